"""A client of pdq over NATS: submit a request, follow its log, cancel it.

It needs only what a tenant may do: publish to its submit subjects, subscribe to its live subjects, and ask
the router's read and cancel endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import Rejected, Unavailable
from pdq.log import to_event
from pdq.messages import CancelReply, Event, ReadPage, ReadRequest, State, decode_json, encode_json

REQUEST_HEADER = "Pdq-Request"
DEADLINE_HEADER = "Pdq-Deadline"
PRIORITY_HEADER = "Pdq-Priority"
ORDER_HEADER = "Pdq-Order"
REPLAY_HEADER = "Pdq-Replay-Of"

ENDPOINT_TIMEOUT_S = 5.0
CATCH_UP_S = 3.0
"""A follower that hears nothing for so long asks the read endpoint: a live copy can be lost."""


class Submitted(NamedTuple):
    """What the broker acknowledged: from here on the request is kept."""

    request: str
    seq: int


def new_request_id() -> str:
    """A name for a request that no other request has."""
    return f"r-{secrets.token_hex(10)}"


class Client:
    """One tenant's view, over a Bus."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        if not subjects.is_token(tenant):
            raise Rejected(f"tenant {tenant[:40]!r} must match [A-Za-z0-9_-]{{1,64}}", param="tenant")
        self.tenant = tenant
        self._bus = bus

    async def submit(
        self,
        body: bytes,
        *,
        model: str,
        request: str = "",
        deadline_s: float | None = None,
        priority: str = "",
        order: str = "",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Submitted:
        """Publish an OpenAI-shaped body to the submit subject of a model (its slug).

        Without `request` the broker's sequence names it. Named, it can be repeated after an error in
        doubt: an id is accepted once. Raises Rejected (too large), QueueFull or Unavailable.
        """
        sent = dict(headers or {})
        if request:
            sent[REQUEST_HEADER] = request
        if deadline_s is not None:
            sent[DEADLINE_HEADER] = f"{deadline_s:g}"
        if priority:
            sent[PRIORITY_HEADER] = priority
        if order:
            sent[ORDER_HEADER] = order
        subject = subjects.submit(self.tenant, subjects.slug(model))
        ack = await self._bus.publish(subject, body, headers=sent, timeout_s=timeout_s)
        return Submitted(request or f"s-{ack.seq}", ack.seq)

    async def read(self, request: str, *, after: int = 0, limit: int = 256) -> ReadPage:
        """One page of a request's events after a sequence. Raises Unavailable."""
        body = encode_json(ReadRequest(after=after, limit=limit))
        answer = await self._bus.request(subjects.read(self.tenant, request), body, timeout_s=ENDPOINT_TIMEOUT_S)
        return decode_json(answer, ReadPage)

    async def state(self, request: str) -> State | None:
        """The newest state of a request; None when the log does not know it. Raises Unavailable."""
        newest, after = None, 0
        while True:
            page = await self.read(request, after=after, limit=1_000)
            for event in page.events:
                newest = event.state or newest
            if not page.more:
                return newest
            after = page.events[-1].seq

    async def cancel(self, request: str) -> CancelReply:
        """End a request; returns the state it is in then. Raises Unavailable."""
        answer = await self._bus.request(subjects.cancel(self.tenant, request), b"", timeout_s=ENDPOINT_TIMEOUT_S)
        return decode_json(answer, CancelReply)

    @contextlib.asynccontextmanager
    async def follow(self, request: str, *, after: int = 0, catch_up: bool = True) -> AsyncIterator[Follower]:
        """Follow a request's log; enter it before submitting and nothing is missed.

        after: resume after this sequence. catch_up: ask first for what is stored already; a request
        that is not submitted yet has nothing.
        """
        follower = Follower(self, request, after, catch_up)
        subscription = await self._bus.follow(subjects.live(self.tenant, request), follower.take)
        forget = self._bus.on_reconnect(follower.suspect)
        try:
            yield follower
        finally:
            forget()
            await self._bus.unsubscribe(subscription)


class Follower:
    """A request's events: live ones, and by the read endpoint what was missed. In order, without repeats."""

    def __init__(self, client: Client, request: str, after: int, catch_up: bool) -> None:
        self.seq = after
        self._client = client
        self._request = request
        self._queue: asyncio.Queue[Stored | None] = asyncio.Queue()
        self._newest = {"state": after, "out": after}
        if catch_up:
            self.suspect()

    def take(self, stored: Stored) -> None:
        self._queue.put_nowait(stored)

    def suspect(self) -> None:
        """Something may have been missed: read before going on."""
        self._queue.put_nowait(None)

    async def events(self, timeout_s: float) -> AsyncIterator[Event]:
        """Events until the terminal one. Raises Unavailable when that has not come within `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        while True:
            left = give_up - time.monotonic()
            if left <= 0:
                raise Unavailable(f"request {self._request} has not ended within {timeout_s:g} s")
            for event in await self._next(min(left, CATCH_UP_S)):
                self.seq = event.seq
                self._newest["state" if event.state else "out"] = event.seq
                yield event
                if event.state is not None and event.state.ended:
                    return

    async def _next(self, wait_s: float) -> list[Event]:
        try:
            stored = await asyncio.wait_for(self._queue.get(), wait_s)
        except TimeoutError:
            return await self._missed()
        if stored is None:
            return await self._missed()
        if stored.seq <= self.seq:
            return []
        kind = subjects.parse_log(stored.subject).kind
        if stored.seq_before > self._newest[kind]:
            return await self._missed()
        return [to_event(stored)]

    async def _missed(self) -> list[Event]:
        """What the log holds after the last event seen; nothing when no router answers (it is asked again)."""
        events: list[Event] = []
        with contextlib.suppress(Unavailable):
            while True:
                page = await self._client.read(self._request, after=events[-1].seq if events else self.seq)
                events.extend(page.events)
                if not page.more:
                    break
        return events
