"""KV cache: the contract between workers, and the LMCache tiers it travels through."""
