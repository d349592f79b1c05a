"""Watching the live states of requests: a cancel, an end or a newer claim stops running work at once.

A worker hears of its own requests only, so what a request costs does not grow with the number of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import UNREADABLE
from pdq.log import Entry
from pdq.messages import StageName, State, decode_json
from pdq.stage import claims
from pdq.stage.run import Run

log = logging.getLogger("pdq.stage")


class Heard:
    """What comes in of one request's state: the newest record counts."""

    def __init__(self) -> None:
        self._newest: Stored | None = None
        self._came = asyncio.Event()

    def take(self, stored: Stored) -> None:
        self._newest = stored
        self._came.set()

    async def next(self, timeout_s: float) -> Entry | None:
        """The newest record that came since the last call; None when none comes in time, or it is unreadable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._came.wait()
        self._came.clear()
        stored, self._newest = self._newest, None
        with contextlib.suppress(*UNREADABLE):
            return Entry(stored.seq, decode_json(stored.data, State)) if stored is not None else None
        return None


class Watch:
    """All requests that one process works on."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._running: dict[tuple[str, str, StageName], tuple[Run, int]] = {}
        self._hearing: dict[tuple[str, str], set[Heard]] = {}

    @contextlib.asynccontextmanager
    async def following(self, tenant: str, request: str) -> AsyncIterator[None]:
        """Hear of a request from before whatever is sent next over this connection. Raises Unavailable."""
        subject = subjects.live_state(tenant, request)
        subscription = await self._bus.follow(subject, self._on_state, confirm=False)
        try:
            yield
        finally:
            await self._bus.unsubscribe(subscription)

    @contextlib.contextmanager
    def running(self, tenant: str, request: str, stage: StageName, attempt: int, run: Run) -> Iterator[None]:
        """Interrupt `run` when its request is cancelled, ends, or is claimed anew."""
        key = (tenant, request, stage)
        self._running[key] = (run, attempt)
        try:
            yield
        finally:
            if self._running.get(key, (None, 0))[0] is run:
                del self._running[key]

    @contextlib.contextmanager
    def hearing(self, tenant: str, request: str) -> Iterator[Heard]:
        """Hear the states of one request. One that is lost is not missed here: look at the log now and then."""
        key, heard = (tenant, request), Heard()
        self._hearing.setdefault(key, set()).add(heard)
        try:
            yield heard
        finally:
            self._hearing[key].discard(heard)
            if not self._hearing[key]:
                del self._hearing[key]

    def _on_state(self, stored: Stored) -> None:
        where = subjects.parse_log(stored.subject)
        for heard in self._hearing.get((where.tenant, where.request), ()):
            heard.take(stored)
        stages: tuple[StageName, ...] = ("prefill", "decode")
        for stage in stages:
            if (found := self._running.get((where.tenant, where.request, stage))) is not None:
                self._judge(stored, stage, *found)

    def _judge(self, stored: Stored, stage: StageName, run: Run, attempt: int) -> None:
        try:
            state = decode_json(stored.data, State)
        except UNREADABLE as exc:
            log.warning("unreadable state record %s: %s", stored.seq, exc)
            return
        if state.event == "cancelling":
            run.interrupt("cancelled")
        elif state.ended or (stage == "prefill" and state.local):
            run.interrupt("ended")
        elif claims.of_stage(state, stage).attempt > attempt:
            run.interrupt("fenced")
