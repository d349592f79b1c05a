"""Blocking looks at a disk, which may hang: not in the executor's threads, whose end a process waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def aside(work: Callable[[], T], timeout_s: float) -> T:
    """What `work` returns or raises. Raises TimeoutError after `timeout_s`; its thread ends with the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(outcome)  # type: ignore[arg-type]

    def run() -> None:
        outcome, error = None, None
        try:
            outcome = work()
        except Exception as exc:
            error = exc
        try:
            loop.call_soon_threadsafe(settle, outcome, error)
        except RuntimeError:
            pass  # the loop has ended: nobody waits

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await done
