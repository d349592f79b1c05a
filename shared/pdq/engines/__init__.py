"""Engines: one contract, one real implementation (vLLM with LMCache), one simulated."""
