"""Whether a stack answers as one plain engine does: the same prompts through both, compared token for token."""
