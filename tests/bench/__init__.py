"""Benchmarks that need no GPU. `python -m tests.bench.control`: what pdq's control path costs, over its floor."""
