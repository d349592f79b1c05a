"""Submitting a request and following its log, over a connected client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from pdq.cli.answer import Answer
from pdq.cli.output import OutputClosed, OutputFailed
from pdq.cli.prompt import Ask
from pdq.client import Client, Follower
from pdq.errors import Rejected, Unavailable
from pdq.messages import Event

Write = Callable[[str], None]

SUBMIT_TIMEOUT_S = 5.0
LONGEST_S = 86_400.0
"""Follow at most so long what has no deadline known here; the request's own deadline ends it much earlier."""
GRACE_S = 30.0
"""An end may come so much later than the deadline."""


async def submit(
    client: Client, ask: Ask, answer: Answer, body: bytes, headers: Mapping[str, str], write: Write
) -> None:
    """Submit and follow to the end. When interrupted, or when nobody reads the answer, the request is cancelled.

    Raises Rejected, QueueFull or Unavailable, and what `write` raises.
    """
    # A name of the caller's own may have been submitted before, and have its answer already.
    async with client.follow(answer.request, catch_up=bool(ask.request)) as follower:
        try:
            await client.submit(
                body,
                model=ask.model,
                request=answer.request,
                deadline_s=ask.deadline_s,
                priority=ask.priority,
                order=ask.order,
                headers=headers,
                timeout_s=SUBMIT_TIMEOUT_S,
            )
            await _take_all(client, follower, answer, write, after=0, timeout_s=_bound(ask.deadline_s))
        except (asyncio.CancelledError, OutputClosed, OutputFailed):
            with contextlib.suppress(asyncio.CancelledError):
                await client.abandon(answer.request)
            raise


async def attach(client: Client, answer: Answer, write: Write, after: int) -> None:
    """Follow a request that was submitted before; text of events after a sequence is written.

    Raises Rejected for a request that the log does not know.
    """
    if await client.state(answer.request) is None:
        raise not_found(answer.request)
    async with client.follow(answer.request) as follower:
        await _take_all(client, follower, answer, write, after=after, timeout_s=LONGEST_S)


def not_found(request: str) -> Rejected:
    return Rejected(f"no request {request} in the log", code="not_found", param="id")


def _bound(deadline_s: float | None) -> float:
    asked = LONGEST_S if deadline_s is None or not 0 < deadline_s < LONGEST_S else deadline_s
    return asked + GRACE_S


async def _take_all(
    client: Client, follower: Follower, answer: Answer, write: Write, *, after: int, timeout_s: float
) -> None:
    async for event in follower.events(timeout_s):
        text = answer.take(event)
        if text and event.seq > after:
            write(text)
    state = answer.state
    if state is not None and state.event == "finished" and not answer.complete:
        # The last live copies may be lost, with nothing after them that would show it.
        write(answer.replace(await _whole(client, answer.request)))


async def _whole(client: Client, request: str) -> list[Event]:
    events: list[Event] = []
    while True:
        page = await client.read(request, after=events[-1].seq if events else 0, limit=1_000)
        events.extend(page.events)
        if not page.more:
            return events


async def cancel(client: Client, request: str) -> str:
    """Cancel a request; returns the event that it ended with. Raises Rejected or Unavailable."""
    reply = await client.cancel(request)
    if reply.state is not None:
        return reply.state.event
    if reply.error is not None and reply.error.code != "not_found":
        raise Unavailable(reply.error.message)
    raise not_found(request)
