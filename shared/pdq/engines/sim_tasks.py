"""Work in slots, each in a task of its own, so that an abort or a failure reaches whatever it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from pdq.errors import Interrupted, Unavailable

CLOSE_TIMEOUT_S = 5.0

T = TypeVar("T")


class Tasks:
    """Runs at most `slots` bodies at one time, the others wait in order. `down` says why none may run, if so."""

    def __init__(self, slots: int) -> None:
        self.down = ""
        self.running = 0
        self._slots = asyncio.Semaphore(slots)
        self._tasks: dict[asyncio.Task[None], str] = {}

    @property
    def waiting(self) -> int:
        return len(self._tasks) - self.running

    def check(self) -> None:
        if self.down:
            raise Unavailable(self.down)

    async def serve(
        self, request: str, body: Callable[[Callable[[T], None]], Awaitable[None]]
    ) -> AsyncGenerator[list[T], None]:
        """What `body` puts, as it puts it: all that came since the last time at once. Closing or cancelling this stops
        the body before it returns.

        Raises what the body raises, Interrupted when it is aborted, and Unavailable when all work is failed.
        """
        self.check()
        items: list[T] = []
        came = asyncio.Event()

        def put(item: T) -> None:
            items.append(item)
            came.set()

        task = asyncio.create_task(self._in_slot(body, put), name=f"sim {request}")
        task.add_done_callback(lambda _: came.set())
        self._tasks[task] = request
        try:
            over = False
            while not over:
                await came.wait()
                came.clear()
                over = task.done()
                if items:
                    taken, items[:] = items[:], []
                    yield taken
            self._raise_of(task)
        finally:
            try:
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            finally:
                del self._tasks[task]

    def abort(self, request: str) -> None:
        for task, name in self._tasks.items():
            if name == request:
                task.cancel()

    def fail(self, why: str) -> None:
        """Stop all work and refuse more; the first reason stays."""
        self.down = self.down or why
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.fail("the engine is closed")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)

    async def _in_slot(self, body: Callable[[Callable[[T], None]], Awaitable[None]], put: Callable[[T], None]) -> None:
        async with self._slots:
            self.running += 1
            try:
                await body(put)
            finally:
                self.running -= 1

    def _raise_of(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            raise Unavailable(self.down) if self.down else Interrupted("cancelled")
        task.result()
