"""Being cancelled while the client library waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from nats.aio.client import Client


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


class Unhurt(Client):  # type: ignore[misc]
    """The client library's, whose read loop outlives a flush that is cancelled or given up.

    It would set the result of the flush's cancelled future, and end with that error: a connection that looks alive, and
    hears nothing until its pings have failed.
    """

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()
