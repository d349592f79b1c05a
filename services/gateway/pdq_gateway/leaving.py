"""Work for a client that may leave meanwhile, in a service that may stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from pdq.errors import PdqError

# Of ASGI, whose messages are dictionaries.
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ClientLeft(PdqError):
    """Nobody waits for the answer any more."""

    code = "client_left"


class Stopping(PdqError):
    """The gateway's time to drain is over."""

    code = "unavailable"


async def while_wanted(
    work: Coroutine[Any, Any, None], receive: Receive, answered: Callable[[], bool], over: asyncio.Event
) -> None:
    """Do the work, unless the client leaves (ClientLeft) or `over` is set (Stopping) before it is `answered`.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    stopping = asyncio.create_task(over.wait())
    try:
        await asyncio.wait({working, leaving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if answered():
            # A server reports a complete answer as a client that left; what remains is to tidy up.
            await asyncio.wait({working})
    finally:
        ended = [task for task in (working, leaving, stopping) if task.done()]
        for task in (working, leaving, stopping):
            task.cancel()
        await asyncio.wait({working, leaving, stopping})
    if working in ended:
        working.result()
    elif leaving in ended:
        raise ClientLeft("the client left")
    else:
        raise Stopping("the gateway is stopping; ask again")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
