"""Old and new builds of the services side by side under a stream of requests: see docs/upgrades.md."""
