"""The prefill service of pdq."""
