"""Deadlines as scheduled messages of the broker: they fire with no worker and no router alive.

(Message schedules: nats-architecture-and-design, ADR-51; server 2.12 and later.)
"""

from __future__ import annotations

import contextlib
import time

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Unavailable


class Timers:
    """One timer per request; setting it again replaces it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def set(self, tenant: str, request: str, at: float) -> None:
        """Make `due` arrive at the reaper at a Unix time (the broker schedules whole seconds: rounded up)."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(at) + 1))
        headers = {"Nats-Schedule": f"@at {moment}", "Nats-Schedule-Target": subjects.due(tenant, request)}
        await self._bus.publish(subjects.timer(tenant, request), b"", headers=headers)

    async def stop(self, tenant: str, request: str) -> None:
        """A timer that stays behind finds its request ended, so this may fail."""
        with contextlib.suppress(Unavailable):
            await self._bus.purge(subjects.REAP, subjects.timer(tenant, request))
