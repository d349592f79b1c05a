"""A small durable write every few seconds, so that a router knows whether the broker stores before a request needs it.

Its readiness tells (`Bus.check_storing`). A worker's beats do the same for a worker.
"""

from __future__ import annotations

import asyncio
import contextlib

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import QueueFull, Unavailable

TIMEOUT_S = 2.0


async def sing(bus: Bus, router: str, every_s: float) -> None:
    """Write until cancelled; `router` is its name."""
    while True:
        with contextlib.suppress(Unavailable, QueueFull):
            await bus.publish(subjects.router_key(router), b"", timeout_s=TIMEOUT_S)
        await asyncio.sleep(every_s)
