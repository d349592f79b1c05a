"""An open-loop load on any OpenAI endpoint, or on pdq over NATS, and what its answers took.

workload.py (which requests, when) → prompts.py (their bodies) → drive.py (sent when they are due, over a `Target`)
→ records.py (what came of each) → metrics.py (what that amounts to) → table.py, plots.py. Definitions: docs/bench.md.
"""
