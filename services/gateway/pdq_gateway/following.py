"""The logs of an answer's choices, as one series of events.

What nobody takes is bounded: a few events here, and the client's followers drop what they cannot hold and read it
again from the log. So a slow client costs memory for a moment's output, however long its answer is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from pdq.client import Client, Follower
from pdq.errors import PdqError, Unavailable
from pdq.messages import Event

MOST_WAITING = 64
"""Events taken from the followers ahead of what the client has read."""


class Heard(NamedTuple):
    choice: int
    event: Event


class Following:
    """Live and stored events of several requests; each one's own are in order, without gaps or repeats."""

    def __init__(self, followers: Sequence[Follower], bound_s: float) -> None:
        self._followers = followers
        self._bound_s = bound_s
        self._queue: asyncio.Queue[Heard | PdqError] = asyncio.Queue(MOST_WAITING)
        self._failed: PdqError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._take(*pair)) for pair in enumerate(self._followers)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def next(self, wait_s: float) -> list[Heard]:
        """All that is there; at least one event, unless none comes within `wait_s`.

        Raises Unavailable or Rejected, once what came before is taken.
        """
        if self._failed is not None:
            raise self._failed
        heard: list[Heard] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s if self._queue.empty() else None):
                heard += self._heard(await self._queue.get())
        while not self._queue.empty():
            heard += self._heard(self._queue.get_nowait())
        if self._failed is not None and not heard:
            raise self._failed
        return heard

    def _heard(self, item: Heard | PdqError) -> tuple[Heard, ...]:
        if isinstance(item, PdqError):
            self._failed = item
            return ()
        return (item,)

    async def _take(self, choice: int, follower: Follower) -> None:
        try:
            async with contextlib.aclosing(follower.events(self._bound_s)) as events:
                async for event in events:
                    await self._queue.put(Heard(choice, event))
        except PdqError as exc:
            await self._queue.put(exc)
        except Exception as exc:
            await self._queue.put(Unavailable(f"the log of choice {choice} cannot be followed: {type(exc).__name__}"))
            raise


@contextlib.asynccontextmanager
async def following(
    client: Client, requests: Sequence[str], *, catch_up: bool, bound_s: float
) -> AsyncIterator[Following]:
    """Follow the logs of requests, for `bound_s` seconds at most. Nothing that is submitted within is missed."""
    async with contextlib.AsyncExitStack() as stack:
        followers = [await stack.enter_async_context(client.follow(request, catch_up=catch_up)) for request in requests]
        found = Following(followers, bound_s)
        stack.push_async_callback(found.close)
        found.start()
        yield found
