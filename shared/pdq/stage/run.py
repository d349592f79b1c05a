"""Work under way on one delivery: it can be told to stop, and says that it makes progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from pdq.errors import Interrupted

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
"""How long interrupted work may take to stop before its owner goes on without it."""


class Run:
    """Interruptible work. `interrupt` may come at any time, from any task; the first cause counts."""

    def __init__(self) -> None:
        self.cause = ""
        self.progressed = time.monotonic()
        self._task: asyncio.Task[Any] | None = None

    def progress(self) -> None:
        """Say that the work moves on: only then is its message kept from others."""
        self.progressed = time.monotonic()

    def interrupt(self, cause: str) -> None:
        """Stop the work: `cancelled`, `expired`, `fenced`, `ended`, `stalled` or `drain`."""
        if not self.cause:
            self.cause = cause
            if self._task is not None:
                self._task.cancel()

    async def guard(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run `work` until it is done, interrupted, or its time is up (`expired`). Raises Interrupted."""
        if self.cause:
            work.close()
            raise Interrupted(self.cause)
        self._task = task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=max(0.0, seconds))
            if not done:
                self.interrupt("expired")
                await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
            if task.done() and not task.cancelled() and not (self.cause and task.exception()):
                return task.result()
            raise Interrupted(self.cause or "cancelled")
        finally:
            self._task = None
            task.cancel()
