"""Being cancelled while the client library waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def heeding_cancel() -> Iterator[None]:
    """Raise CancelledError at the end if the task was cancelled meanwhile, whatever became of what it awaited.

    The client library waits with `asyncio.wait_for`, which before Python 3.12 takes the result, and forgets that it
    was cancelled, when both come in the same turn of the event loop. Its caller would go on, perhaps for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
