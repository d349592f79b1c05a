"""The same load on several set-ups over the same cores or GPUs, one after the other, in rounds.

hardware.py (what each engine gets) → setups.py (what is compared) → plain.py, topologies.py (what runs for each)
→ loads.py (what is asked of all of them alike) → run.py (the rounds) → rows.py, verdicts.py (pure: what came of it)
→ report.py, plots.py. Definitions: docs/bench.md.
"""
