"""Every KV mode in every order with real engines, and what happens when what KV passes through fails."""
