"""A router that remembers less, so that its memory is full before it is measured: `python -m tests.soak.small_router`.

It remembers which prompts are likely cached, up to a bound of some 20 MB, which the soak's prompts would fill in hours.
Nothing of this is in the router itself: the bounds are replaced in this process before it starts.
"""

from __future__ import annotations

import runpy

from pdq_router import prefixes

POSITIONS, ROUTED = 4_000, 100
"""More than the prompts of a log's age have, and than are on their way at one time."""

if __name__ == "__main__":
    prefixes.NUM_POSITIONS, prefixes.NUM_ROUTED = POSITIONS, ROUTED
    runpy.run_module("pdq_router", run_name="__main__", alter_sys=True)
