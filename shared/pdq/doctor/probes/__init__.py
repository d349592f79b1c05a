"""What is asked of broker, LMCache servers, workers and this machine. Every probe is bounded, and writes nothing."""
