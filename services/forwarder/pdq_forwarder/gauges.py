"""Reads every few seconds what waits at the site, for /metrics."""

from __future__ import annotations

import asyncio
from datetime import datetime

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Unavailable

from pdq_forwarder.metrics import ForwarderMetrics

READ_EVERY_S = 3.0


class Gauges:
    def __init__(self, bus: Bus, metrics: ForwarderMetrics) -> None:
        self._bus = bus
        self._metrics = metrics

    async def run(self) -> None:
        """Read and show until cancelled."""
        while True:
            await self._show()
            await asyncio.sleep(READ_EVERY_S)

    async def _show(self) -> None:
        try:
            info = await self._bus.stream_info(subjects.EDGE)
        except Unavailable:
            info = None
        if info is None:
            self._metrics.waiting()
            return
        requests = int(info["state"]["messages"])
        # By the broker's clock alone.
        age_s = _unix_s(info["ts"]) - _unix_s(info["state"]["first_ts"]) if requests else 0.0
        self._metrics.waiting(requests, max(0.0, age_s))


def _unix_s(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
