"""Which workers are alive, and what they say of themselves: the beats in the PDQ_WORKERS bucket."""

from __future__ import annotations

import asyncio
import contextlib
import time

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import NotDecodable
from pdq.messages import StageName, WorkerBeat, decode_json

FRESH_S = 1.0
PAGE = 500

Beats = tuple[WorkerBeat, ...]


class Fleet:
    """Asked as often as wanted; it asks the broker at most once in `FRESH_S` for a stage and model."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: dict[tuple[StageName, str], tuple[float, Beats]] = {}
        self._asking = asyncio.Lock()

    async def beats(self, stage: StageName, model: str) -> Beats:
        """The newest beat of every live worker of a stage and model. Raises Unavailable."""
        async with self._asking:
            asked_at, beats = self._known.get((stage, model), (-FRESH_S, ()))
            if time.monotonic() - asked_at >= FRESH_S:
                beats = await self._read(stage, model)
                self._known[stage, model] = (time.monotonic(), beats)
            return beats

    async def _read(self, stage: StageName, model: str) -> Beats:
        beats: list[WorkerBeat] = []
        after, more = 0, True
        while more:
            page = await self._bus.read(subjects.WORKERS, subjects.workers_of(stage, model), after=after, limit=PAGE)
            for stored in page:
                after = stored.seq
                # A worker of a newer version may beat in a way that this one cannot read.
                with contextlib.suppress(NotDecodable):
                    beats.append(decode_json(stored.data, WorkerBeat))
            more = len(page) == PAGE
        return tuple(beats)
