"""Keeps a count of what tenants have true to the broker: it hears every live state, and looks into the queues where it
may have missed some, at its start and after a reconnect. A job stays in its queue until it is settled, so what is in
flight is there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from functools import partial

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import Unavailable
from pdq.tenants.usage import Request, TenantUsage

StoredCallback = Callable[[Stored], None]

log = logging.getLogger("pdq.tenants")

AT_ONCE = 50
RETRY_S = 1.0


class Feed:
    """`start` it, then `run` it beside what uses the count. others: who else is told of every state."""

    def __init__(self, bus: Bus, usage: TenantUsage, *others: StoredCallback) -> None:
        self._bus = bus
        self._usage = usage
        self._others = others
        self._missed = asyncio.Event()

    async def start(self) -> None:
        """Hear of everything from now on, and count what is in flight. Waits for the broker as `patiently` does."""
        await self._bus.patiently(partial(self._bus.follow, subjects.LIVE_STATES, self._hear))
        self._bus.on_reconnect(self._missed.set)
        await self._bus.patiently(self.catch_up)

    async def run(self) -> None:
        """Read what was missed, until cancelled."""
        while True:
            await self._missed.wait()
            self._missed.clear()
            try:
                await self.catch_up()
            except Unavailable as exc:
                log.info("what is in flight cannot be read yet: %s", exc)
                self._missed.set()
                await asyncio.sleep(RETRY_S)

    async def catch_up(self) -> None:
        """Count what is in the queues, and nothing that is not. Raises Unavailable."""
        queued = await self._queued()
        self._usage.keep(queued)
        unknown = (request for request in queued if request not in self._usage)
        while some := tuple(itertools.islice(unknown, AT_ONCE)):
            for stored in await asyncio.gather(*(self._state(request) for request in some)):
                if stored is not None:
                    self._usage.hear(stored, new=False)

    def _hear(self, stored: Stored) -> None:
        self._usage.hear(stored)
        for hear in self._others:
            hear(stored)

    async def _queued(self) -> set[Request]:
        found: set[Request] = set()
        for stage, stream in subjects.STAGE_STREAM.items():
            info = await self._bus.stream_info(stream, f"pdq.{stage}.>")
            jobs = map(subjects.parse_job, (info["state"].get("subjects") or {}) if info is not None else ())
            found.update((job.tenant, job.request) for job in jobs)
        return found

    async def _state(self, request: Request) -> Stored | None:
        return await self._bus.last(subjects.LOG, subjects.state(*request))
