"""Which workers are alive, and what they say of themselves: the beats in the PDQ_WORKERS bucket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import UNREADABLE
from pdq.messages import StageName, WorkerBeat, decode_json

FRESH_S = 1.0
BEATS_S = 3.0
"""All beats of many workers are good for so long at most: each comes but once in about that time."""
RARELY = 50
"""What takes long to read is good for so many times as long."""
PAGE, FEW = 500, 16

Beats = tuple[WorkerBeat, ...]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Fresh(Generic[K, T]):
    """Answers that are good for `FRESH_S`, and for up to `most_s` where reading takes long. Whoever asks meanwhile gets
    the same one, or the same failure: a broker that does not answer must not be waited for by one after the other."""

    def __init__(self, read: Callable[[K], Coroutine[Any, Any, T]], most_s: float = 0.0) -> None:
        self._read = read
        self._most_s = most_s
        self._asked: dict[K, _Asked[T]] = {}

    async def get(self, key: K) -> T:
        """Raises what `read` raises."""
        asked = self._asked.get(key)
        if asked is None or asked.over:
            self._asked = {key: asked for key, asked in self._asked.items() if not asked.over}
            asked = self._asked[key] = _Asked(asyncio.create_task(self._read(key)), self._most_s)
        return await asyncio.shield(asked.task)


class _Asked(Generic[T]):
    """One answer, or the question under way."""

    def __init__(self, task: asyncio.Task[T], most_s: float) -> None:
        self.task = task
        self._at = time.monotonic()
        self._took_s = 0.0
        self._most_s = most_s
        task.add_done_callback(self._answered)

    @property
    def over(self) -> bool:
        good_s = max(FRESH_S, min(self._most_s, RARELY * self._took_s))
        return self.task.done() and (_failed(self.task) or time.monotonic() - self._at >= good_s)

    def _answered(self, task: asyncio.Task[T]) -> None:
        self._took_s = time.monotonic() - self._at
        _failed(task)  # looked at here, should everyone who waits for it be gone by then


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.cancelled() or task.exception() is not None


class Fleet:
    """The live workers. Asked as often as wanted; it asks the broker the same at most once a second.

    Who asks for every request asks for no more than it needs: to read all beats takes the longer, the more workers
    there are, and they are read the more rarely.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._beats = Fresh(self._read, BEATS_S)
        self._beat = Fresh(self._read_one)
        self._anyone = Fresh(self._look_for)

    async def beats(self, stage: StageName, model: str) -> Beats:
        """The newest beat of every live worker of a stage and model. Raises Unavailable."""
        return await self._beats.get((stage, model))

    async def beat(self, stage: StageName, model: str, worker: str) -> WorkerBeat | None:
        """The newest beat of one worker; None: it is not alive. Raises Unavailable."""
        return await self._beat.get((stage, model, worker))

    async def anyone(self, stage: StageName, model: str, contract: str) -> bool:
        """Whether a worker is alive whose KV is of this contract. Raises Unavailable."""
        return await self._anyone.get((stage, model, contract))

    async def _read(self, key: tuple[StageName, str]) -> Beats:
        return tuple([beat async for beat in self._found(subjects.workers_of(*key), PAGE)])

    async def _read_one(self, key: tuple[StageName, str, str]) -> WorkerBeat | None:
        async for beat in self._found(subjects.worker_key(*key), 1):
            return beat
        return None

    async def _look_for(self, key: tuple[StageName, str, str]) -> bool:
        stage, model, contract = key
        async for beat in self._found(subjects.workers_of(stage, model), FEW):
            if beat.contract == contract:
                return True
        return False

    async def _found(self, subject: str, page: int) -> AsyncIterator[WorkerBeat]:
        """Beats as they are stored, read `page` at a time."""
        after, more = 0, True
        while more:
            stored_page = await self._bus.read(subjects.WORKERS, subject, after=after, limit=page)
            for stored in stored_page:
                after = stored.seq
                # A worker of a newer version may beat in a way that this one cannot read.
                with contextlib.suppress(*UNREADABLE):
                    yield decode_json(stored.data, WorkerBeat)
            more = len(stored_page) == page
