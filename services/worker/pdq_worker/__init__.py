"""The worker service of pdq."""
