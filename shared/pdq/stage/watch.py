"""Watching the live states of requests: a cancel, an end or a newer claim stops running work at once.

What was heard last of a request is also what a claim of it tries first. It may be out of date, and then the
broker refuses the claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import UNREADABLE
from pdq.log import UNREAD, Entry, Known
from pdq.messages import StageName, State, decode_json
from pdq.stage import claims
from pdq.stage.run import Run

log = logging.getLogger("pdq.stage")

NUM_HEARD = 1_024
"""Requests whose newest state is remembered until they are claimed here."""


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
    """One subscription per process, whatever it runs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._running: dict[tuple[str, str, StageName], tuple[Run, int]] = {}
        self._heard: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._hearing: dict[tuple[str, str], set[Heard]] = {}
        self._listeners: list[Callable[[Stored], None]] = []

    async def start(self) -> None:
        await self._bus.follow(subjects.LIVE_STATES, self._on_state)

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

    def listen(self, listener: Callable[[Stored], None]) -> None:
        """Call `listener` with every state record of every request from now on; it must be quick and raise nothing."""
        self._listeners.append(listener)

    def heard(self, tenant: str, request: str) -> Known:
        """What was last heard of a request's state; it is forgotten here."""
        seq, data = self._heard.pop((tenant, request), (0, b""))
        with contextlib.suppress(*UNREADABLE):
            return Entry(seq, decode_json(data, State)) if seq else UNREAD
        return UNREAD

    def _on_state(self, stored: Stored) -> None:
        where = subjects.parse_log(stored.subject)
        self._remember((where.tenant, where.request), stored)
        for heard in self._hearing.get((where.tenant, where.request), ()):
            heard.take(stored)
        for listener in self._listeners:
            listener(stored)
        stages: tuple[StageName, ...] = ("prefill", "decode")
        for stage in stages:
            if (found := self._running.get((where.tenant, where.request, stage))) is not None:
                self._judge(stored, stage, *found)

    def _remember(self, key: tuple[str, str], stored: Stored) -> None:
        self._heard.pop(key, None)
        self._heard[key] = (stored.seq, stored.data)
        if len(self._heard) > NUM_HEARD:
            del self._heard[next(iter(self._heard))]

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
