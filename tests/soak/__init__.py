"""The soak: hours of half load, and what no process may gain meanwhile."""
