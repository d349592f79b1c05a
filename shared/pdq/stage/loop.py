"""The worker loop, written once: a slot, then a message, then the work, each in a task of its own.

It never claims what it has no slot for, keeps the messages of working tasks from others as long as they
make progress, and stops in order: no new messages, let finish what fits in the drain time, interrupt the
rest (their work gives the messages back), then close the pulls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from pdq.bus import Delivery, Puller
from pdq.stage.run import STOP_TIMEOUT_S, Run

log = logging.getLogger("pdq.stage")

Process = Callable[[Delivery, Run], Awaitable[None]]
"""Does all the work of one delivery and settles it; raises only what nobody foresaw."""

Admit = Callable[[], Coroutine[Any, Any, None]]
"""Returns when there is room for one more delivery."""

UNFORESEEN_DELAY_S = 5.0


class _Job(NamedTuple):
    """What a task works on."""

    delivery: Delivery
    run: Run


class Loop:
    """Deliveries of one Puller, up to `slots` at a time."""

    def __init__(
        self,
        puller: Puller,
        process: Process,
        *,
        slots: int,
        ack_wait_s: float,
        stall_s: float,
        drain_s: float,
        on_change: Callable[[int], None] = lambda busy: None,
        admit: Admit | None = None,
    ) -> None:
        """on_change: called with the number of busy slots whenever it changes. admit: awaited before each
        pull."""
        self._puller = puller
        self._process = process
        self._free = asyncio.Semaphore(slots)
        self._beat_s = ack_wait_s / 3
        self._stall_s = stall_s
        self._drain_s = drain_s
        self._on_change = on_change
        self._admit = admit
        self._jobs: dict[asyncio.Task[None], _Job] = {}
        self.held_up = False
        """Whether it waits for room: there may be work that it does not take."""

    @property
    def busy(self) -> int:
        return len(self._jobs)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then stop in order."""
        stopping = asyncio.create_task(stop.wait())
        taking, keeping = asyncio.create_task(self._take(stop)), asyncio.create_task(self._keep())
        try:
            await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, taking):
                task.cancel()
            await asyncio.wait({taking})
            await self._drain()
            keeping.cancel()
        if not taking.cancelled():
            taking.result()

    async def _take(self, stop: asyncio.Event) -> None:
        """Begin one delivery after the other, each once there is a slot for it; safe to cancel."""
        while True:
            await self._free.acquire()
            delivery = await self._next()
            if stop.is_set():
                # It came as the stop did. Nobody has claimed it: another worker can have it at once.
                await delivery.nak()
                return
            self._begin(delivery)

    async def _next(self) -> Delivery:
        if self._admit is not None:
            self.held_up = True
            try:
                await self._admit()
            finally:
                self.held_up = False
        return await self._puller.get()

    def _begin(self, delivery: Delivery) -> None:
        job = _Job(delivery, Run())
        task = asyncio.create_task(self._one(job), name=f"job {delivery.seq}")
        self._jobs[task] = job
        self._on_change(self.busy)
        task.add_done_callback(self._end)
        if self._free.locked():
            self._puller.rest()

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._jobs[task]
        self._free.release()
        self._on_change(self.busy)

    async def _one(self, job: _Job) -> None:
        try:
            await self._process(job.delivery, job.run)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("unforeseen error", extra={"action": "unforeseen", "stream": job.delivery.stream})
            await job.delivery.nak(UNFORESEEN_DELAY_S)

    async def _keep(self) -> None:
        """Keep the messages of running work from others, but only while it makes progress."""
        while True:
            await asyncio.sleep(self._beat_s)
            for task, (delivery, run) in list(self._jobs.items()):
                if time.monotonic() - run.progressed >= self._stall_s:
                    # Not kept any more, whether it stops or not: another worker must get it.
                    run.interrupt("stalled")
                elif task in self._jobs:
                    await delivery.in_progress()

    async def _drain(self) -> None:
        if self._jobs:
            await asyncio.wait(list(self._jobs), timeout=self._drain_s)
        for job in self._jobs.values():
            job.run.interrupt("drain")
        if self._jobs:
            await asyncio.wait(list(self._jobs), timeout=STOP_TIMEOUT_S)
        for task in self._jobs:
            task.cancel()
        await self._puller.close()
