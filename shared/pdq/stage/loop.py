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
from typing import Any, TypeVar

from pdq.bus import Delivery, Puller
from pdq.stage.run import STOP_TIMEOUT_S, Run

log = logging.getLogger("pdq.stage")

Process = Callable[[Delivery, Run], Awaitable[None]]
"""Does all the work of one delivery and settles it; raises only what nobody foresaw."""

Admit = Callable[[], Coroutine[Any, Any, None]]
"""Returns when there is room for one more delivery."""

T = TypeVar("T")

UNFORESEEN_DELAY_S = 5.0


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
        self._runs: dict[asyncio.Task[None], Run] = {}
        self.held_up = False
        """Whether it waits for room: there may be work that it does not take."""

    @property
    def busy(self) -> int:
        return len(self._runs)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then stop in order."""
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                if await _first(self._free.acquire(), stopping) is None:
                    break
                delivery = await _first(self._next(), stopping)
                if delivery is not None and stop.is_set():
                    # It came as the stop did. Nobody has claimed it: another worker can have it at once.
                    await delivery.nak()
                    delivery = None
                if delivery is None:
                    self._free.release()
                    break
                self._begin(delivery)
        finally:
            stopping.cancel()
            await self._drain()

    async def _next(self) -> Delivery:
        if self._admit is not None:
            self.held_up = True
            try:
                await self._admit()
            finally:
                self.held_up = False
        return await self._puller.get()

    def _begin(self, delivery: Delivery) -> None:
        run = Run()
        task = asyncio.create_task(self._one(delivery, run), name=f"job {delivery.seq}")
        self._runs[task] = run
        self._on_change(self.busy)
        task.add_done_callback(self._end)
        if self._free.locked():
            self._puller.rest()

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._runs[task]
        self._free.release()
        self._on_change(self.busy)

    async def _one(self, delivery: Delivery, run: Run) -> None:
        beats = asyncio.create_task(self._beat(delivery, run))
        try:
            await self._process(delivery, run)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("unforeseen error", extra={"action": "unforeseen", "stream": delivery.stream})
            await delivery.nak(UNFORESEEN_DELAY_S)
        finally:
            beats.cancel()

    async def _beat(self, delivery: Delivery, run: Run) -> None:
        """Keep the message from others, but only while the work makes progress."""
        while time.monotonic() - run.progressed < self._stall_s:
            await asyncio.sleep(self._beat_s)
            await delivery.in_progress()
        run.interrupt("stalled")

    async def _drain(self) -> None:
        if self._runs:
            await asyncio.wait(list(self._runs), timeout=self._drain_s)
        for run in self._runs.values():
            run.interrupt("drain")
        if self._runs:
            await asyncio.wait(list(self._runs), timeout=STOP_TIMEOUT_S)
        for task in self._runs:
            task.cancel()
        await self._puller.close()


async def _first(wanted: Coroutine[Any, Any, T], stopping: asyncio.Task[Any]) -> T | None:
    """The result of `wanted`, or None when stopping came first; `wanted` is cancelled then."""
    task = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
