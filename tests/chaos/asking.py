"""The client's side of a request: submit it, follow it, perhaps cancel, repeat, or leave and come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from pdq.client import Client, Follower
from pdq.errors import Retryable, Unavailable
from pdq.messages import CancelReply, Event

from tests.chaos.plan import Ask
from tests.chaos.reference import body
from tests.stack import MODEL

RETRY_S = 0.2
T = TypeVar("T")


class Asked:
    """What came of one request, as its client saw it."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.seen: list[Event] = []
        self.cancelled: CancelReply | None = None
        self.error = ""
        """Why its client gave up, if it did."""

    @property
    def num_tokens(self) -> int:
        """Tokens seen, repeated ones included."""
        return sum(len(event.out.token_ids()) for event in self.seen if event.out is not None)

    @property
    def ended(self) -> bool:
        return bool(self.seen and self.seen[-1].state is not None and self.seen[-1].state.ended)


class Asker:
    """Runs requests over one client. `bound_s`: how long anything may take before it counts as lost."""

    def __init__(self, client: Client, bound_s: float, model: str = MODEL) -> None:
        self._client = client
        self._bound_s = bound_s
        self._model = model

    async def run(self, asked: Asked, started: float) -> None:
        """Ask at the request's time; never raises, but notes what went wrong. `started`: monotonic."""
        await asyncio.sleep(max(0.0, started + asked.ask.at_s - time.monotonic()))
        try:
            async with asyncio.timeout(self._bound_s):
                await self._all(asked)
        except TimeoutError:
            asked.error = f"not done within {self._bound_s:g} s"
        except ExceptionGroup as group:
            asked.error = "; ".join(f"{type(one).__name__}: {one}" for one in group.exceptions)

    async def _all(self, asked: Asked) -> None:
        ask = asked.ask
        async with asyncio.TaskGroup() as group:
            following = asyncio.Event()
            group.create_task(self._follow(asked, following))
            await following.wait()
            await self._submit(ask)
            if ask.cancel_s is not None:
                group.create_task(self._cancel(asked, ask.cancel_s))
            if ask.again_s is not None:
                group.create_task(self._again(ask, ask.again_s))

    async def _submit(self, ask: Ask) -> None:
        async def once() -> None:
            await self._client.submit(
                body(ask),
                model=self._model,
                request=ask.request,
                deadline_s=ask.deadline_s,
                priority=ask.priority,
                order=ask.order,
            )

        await until_it_works(once)

    async def _again(self, ask: Ask, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._submit(ask)

    async def _cancel(self, asked: Asked, after_s: float) -> None:
        await asyncio.sleep(after_s)

        async def once() -> CancelReply:
            reply = await self._client.cancel(asked.ask.request)
            if reply.state is None:
                # Not accepted yet, or the router could not reach the broker: a client asks again.
                raise Unavailable("not cancelled")
            return reply

        asked.cancelled = await until_it_works(once)

    async def _follow(self, asked: Asked, following: asyncio.Event) -> None:
        leave_s = asked.ask.leave_s
        while not asked.ended:
            after = asked.seen[-1].seq if asked.seen else 0
            try:
                coming_back = following.is_set()
                async with self._client.follow(asked.ask.request, after=after, catch_up=coming_back) as follower:
                    following.set()
                    await self._read(asked, follower, leave_s)
                leave_s = None
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    async def _read(self, asked: Asked, follower: Follower, leave_s: float | None) -> None:
        leave_at = time.monotonic() + (self._bound_s if leave_s is None else leave_s)
        async with aclosing(follower.events(self._bound_s)) as events:
            async for event in events:
                asked.seen.append(event)
                if time.monotonic() >= leave_at:
                    return


async def until_it_works(once: Callable[[], Awaitable[T]]) -> T:
    """Again and again; the request's own bound ends it."""
    while True:
        try:
            return await once()
        except Retryable:
            await asyncio.sleep(RETRY_S)
