"""Requests at a site while its uplink, its broker, its forwarder and its hub break: see docs/edge.md."""
