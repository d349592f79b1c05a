"""The gateway service: OpenAI's HTTP API over the request log."""
