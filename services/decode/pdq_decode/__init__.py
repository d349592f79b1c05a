"""The decode service of pdq."""
