"""pdq: prefill and decode of language models as two durable work queues over NATS JetStream."""

__version__ = "0.1.0"
