"""A request as its live reader sees it, with the time at which each event came."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from pdq.client import Client, Follower, new_request_id
from pdq.messages import Event

from tests.ask import Answer

PATIENCE_S = 120.0
"""Far above anything measured: what takes longer is an error."""


class Live(Answer):
    """An answer, and when its events came: `times` are Unix seconds, one per event."""

    def __init__(self, request: str) -> None:
        super().__init__(request)
        self.times: list[float] = []
        self._news = asyncio.Event()

    def take(self, event: Event) -> None:
        self.times.append(time.time())
        super().take(event)
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Raises TimeoutError when the condition does not hold within `PATIENCE_S`."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_tokens(self, num: int) -> None:
        await self.until(lambda: len(self.transcript.ids) >= num)

    async def when(self, wanted: Callable[[Event], object]) -> float:
        """When the first event of this kind came; waits for it."""

        def found() -> list[float]:
            return [at for at, event in zip(self.times, self.events, strict=True) if wanted(event)]

        await self.until(found)
        return found()[0]

    async def next_tokens(self, after: float) -> float:
        """When the first tokens came that were not shown by the time `after`; waits for them."""
        shown = max((end for at, end in self._ends() if at <= after), default=0)

        def found() -> list[float]:
            return [at for at, end in self._ends() if at > after and end > shown]

        await self.until(found)
        return found()[0]

    def _ends(self) -> list[tuple[float, int]]:
        """For each record of tokens: when it came, and the index after its last one."""
        outs = [(at, event.out) for at, event in zip(self.times, self.events, strict=True) if event.out is not None]
        return [(at, out.index + len(out.token_ids())) for at, out in outs]


def state(name: str) -> Callable[[Event], bool]:
    """Events of that state."""
    return lambda event: event.state is not None and event.state.event == name


def ended(event: Event) -> bool:
    return event.state is not None and event.state.ended


@contextlib.asynccontextmanager
async def reading(client: Client) -> AsyncIterator[Live]:
    """A request that is yet to be submitted, read in the background as long as the `with` lasts."""
    live = Live(new_request_id())
    async with client.follow(live.request, catch_up=False) as follower:
        task = asyncio.create_task(_read(follower, live))
        try:
            yield live
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def asked(client: Client, body: bytes, **options: Any) -> AsyncIterator[Live]:
    """A request that is submitted and read. Leaving the `with` cancels it, unless it has ended, and sees its end."""
    async with reading(client) as live:
        await client.submit(body, request=live.request, **options)
        yield live
        if not live.terminal:
            await client.cancel(live.request)
        await live.until(lambda: live.terminal)


async def _read(follower: Follower, live: Live) -> None:
    async for event in follower.events(2 * PATIENCE_S):
        live.take(event)
