"""Which workers are alive, and what they say of themselves: the beats in the PDQ_WORKERS bucket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import UNREADABLE
from pdq.messages import StageName, WorkerBeat, decode_json

FRESH_S = 1.0
PAGE = 500

Beats = tuple[WorkerBeat, ...]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Fresh(Generic[K, T]):
    """Answers that are good for `FRESH_S`. Whoever asks meanwhile gets the same one, or the same failure: a broker
    that does not answer must not be waited for by one after the other."""

    def __init__(self, read: Callable[[K], Coroutine[Any, Any, T]]) -> None:
        self._read = read
        self._asked: dict[K, tuple[float, asyncio.Task[T]]] = {}

    async def get(self, key: K) -> T:
        """Raises what `read` raises."""
        at, task = self._asked.get(key, (0.0, None))
        if task is None or (task.done() and (_failed(task) or time.monotonic() - at >= FRESH_S)):
            task = asyncio.create_task(self._read(key))
            # Looked at here, should everyone who waits for it be gone by then.
            task.add_done_callback(_failed)
            self._asked[key] = (time.monotonic(), task)
        return await asyncio.shield(task)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


class Fleet:
    """The live workers. Asked as often as wanted; it asks the broker at most once a second for a stage and model."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._beats = Fresh(self._read)

    async def beats(self, stage: StageName, model: str) -> Beats:
        """The newest beat of every live worker of a stage and model. Raises Unavailable."""
        return await self._beats.get((stage, model))

    async def _read(self, key: tuple[StageName, str]) -> Beats:
        beats: list[WorkerBeat] = []
        after, more = 0, True
        while more:
            page = await self._bus.read(subjects.WORKERS, subjects.workers_of(*key), after=after, limit=PAGE)
            for stored in page:
                after = stored.seq
                # A worker of a newer version may beat in a way that this one cannot read.
                with contextlib.suppress(*UNREADABLE):
                    beats.append(decode_json(stored.data, WorkerBeat))
            more = len(page) == PAGE
        return tuple(beats)
