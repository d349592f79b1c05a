"""Which workers are alive, from the PDQ_WORKERS bucket; asked at most once a second."""

from __future__ import annotations

import time

from pdq import subjects
from pdq.bus import Bus
from pdq.messages import StageName

FRESH_S = 1.0


class LiveWorkers:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[tuple[StageName, str], tuple[float, int]] = {}

    async def count(self, stage: StageName, model: str) -> int:
        """Workers of a stage and model whose beats come. Raises Unavailable."""
        asked_at, count = self._known.get((stage, model), (0.0, 0))
        if time.monotonic() - asked_at > FRESH_S:
            info = await self._bus.stream_info(subjects.WORKERS, subjects.workers_of(stage, model))
            count = len((info or {}).get("state", {}).get("subjects") or {})
            self._known[stage, model] = (time.monotonic(), count)
        return count
