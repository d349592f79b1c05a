"""How long the promises take: from a cancel to an idle engine, from a kill or a broker's return to the next token."""
