"""The router service of pdq."""
