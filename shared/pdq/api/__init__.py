"""The shapes of OpenAI's API: requests, which the router and the gateway check alike, and answers."""
