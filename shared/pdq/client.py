"""A client of pdq over NATS: submit a request, follow its log, cancel it.

It needs only what a tenant may do: publish to its submit subjects, subscribe to its live subjects, and ask
the router's read and cancel endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import NamedTuple

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import NewerVersion, PdqError, Rejected, Unavailable
from pdq.log import Transcript, to_event
from pdq.messages import CancelReply, Event, PurgeReply, ReadPage, ReadRequest, State, decode_json, encode_json

REQUEST_HEADER = "Pdq-Request"
DEADLINE_HEADER = "Pdq-Deadline"
PRIORITY_HEADER = "Pdq-Priority"
ORDER_HEADER = "Pdq-Order"
REPLAY_HEADER = "Pdq-Replay-Of"

SITE_SEQ_HEADER = "Pdq-Site-Seq"
"""Of a request that came by way of a site: its sequence there, which names it unless it has a name."""
SITE_TIME_HEADER = "Pdq-Site-Time"
"""When the site's broker stored it, Unix seconds: its deadline counts from then."""
SITE_TOO_LARGE_HEADER = "Pdq-Site-Too-Large"
"""Bytes of a body that the hub does not take: the request comes without it, to fail."""

ENDPOINT_TIMEOUT_S = 5.0
PURGE_TIMEOUT_S = 15.0
"""A purge cancels first, and looks for the request among those that wait."""
ABANDON_TIMEOUT_S = 4.0
ABANDON_RETRY_S = 0.2
CATCH_UP_S = 3.0
"""A follower that hears nothing for so long asks the read endpoint: a live copy can be lost."""
RETRY_S = 0.25
MOST_HELD_BYTES = 1 << 20
"""Of live events that nobody has asked for yet. What is more is dropped, and read from the log when it is asked for."""


class Submitted(NamedTuple):
    """What the broker acknowledged: from here on the request is kept."""

    request: str
    seq: int


def new_request_id() -> str:
    """A name for a request that no other request has."""
    return f"r-{secrets.token_hex(10)}"


def idempotent_id(key: str) -> str:
    """The request id of an idempotency key: the same key is the same request, and runs once."""
    return f"k-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


class Client:
    """One tenant's view, over a Bus."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        if not subjects.is_token(tenant):
            raise Rejected(f"tenant {tenant[:40]!r} must match [A-Za-z0-9_-]{{1,64}}", param="tenant")
        self.tenant = tenant
        self._bus = bus

    @property
    def cut_off(self) -> bool:
        """Whether the broker has closed the connection for good: it refuses this client from now on."""
        return self._bus.closed.is_set()

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

        Without `request` its sequence names it, at the broker that acknowledged: the hub's, or a site's own. Named, it
        can be repeated after an error in doubt: an id is accepted once. Raises Rejected (too large), QueueFull or
        Unavailable.
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
        return Submitted(request or subjects.sequence_name(ack.stream, ack.seq), ack.seq)

    async def read(self, request: str, *, after: int = 0, limit: int = 256) -> ReadPage:
        """One page of a request's events after a sequence. Raises Unavailable, or Rejected."""
        body = encode_json(ReadRequest(after=after, limit=limit))
        answer = await self._bus.request(subjects.read(self.tenant, request), body, timeout_s=ENDPOINT_TIMEOUT_S)
        page = decode_json(answer, ReadPage)
        if page.error is None:
            return page
        if page.error.code in (Unavailable.code, NewerVersion.code):
            # Another router may be of another build.
            raise Unavailable(page.error.message)
        raise Rejected(page.error.message, code=page.error.code)

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

    async def abandon(self, request: str, within_s: float = ABANDON_TIMEOUT_S) -> None:
        """Cancel a request that was just submitted and that nobody waits for any more: the router may not have seen it
        yet. Raises nothing: what cannot be cancelled in time ends by itself."""
        with contextlib.suppress(PdqError, TimeoutError):
            async with asyncio.timeout(within_s):
                while not await self._cancelled(request):  # noqa: ASYNC110
                    await asyncio.sleep(ABANDON_RETRY_S)

    async def _cancelled(self, request: str) -> bool:
        """False where another try may do better."""
        try:
            return (await self.cancel(request)).state is not None
        except Unavailable:
            return False

    async def purge(self, request: str) -> PurgeReply:
        """End a request and remove all that is stored of it; says what was removed. Raises Unavailable.

        As with `cancel`, what is wrong is in the reply's `error`: `not_found` when there is nothing of it, also after
        an earlier purge; `unavailable` when it may be half done, and is to be asked for again.
        """
        answer = await self._bus.request(subjects.purge(self.tenant, request), b"", timeout_s=PURGE_TIMEOUT_S)
        return decode_json(answer, PurgeReply)

    @contextlib.asynccontextmanager
    async def follow(self, request: str, *, after: int = 0, catch_up: bool = True) -> AsyncIterator[Follower]:
        """Follow a request's log; enter it before submitting and nothing is missed.

        after: resume after this sequence. catch_up: ask first for what is stored already; a request
        that is not submitted yet has nothing.
        """
        follower = Follower(self, request, after, catch_up)
        subscription = await self._bus.follow(subjects.live(self.tenant, request), follower.take)
        forget = self._bus.on_disconnect(follower.suspect)
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
        self._held_bytes = 0
        self._newest = {"state": after, "out": after}
        self._attempt = 0
        """The newest of decode's attempts that were seen: its claim is stored before its tokens are."""
        self._transcript = Transcript() if not after else None
        """From the start of the log, the follower knows whether the end it sees is complete."""
        self._suspicious = catch_up
        """Something may have been missed: the log is read before a live event is believed to be the next."""

    def take(self, stored: Stored) -> None:
        self._queue.put_nowait(stored)
        self._held_bytes += len(stored.data)
        if self._held_bytes > MOST_HELD_BYTES and self._queue.qsize() > 1:
            self._drop()

    def _drop(self) -> None:
        """Forget what nobody has asked for."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._held_bytes = 0
        self.suspect()

    def suspect(self) -> None:
        """What was taken so far may not be followed by what is taken next."""
        self._queue.put_nowait(None)

    async def events(self, timeout_s: float) -> AsyncGenerator[Event, None]:
        """Events until the terminal one. Raises Unavailable when that has not come within `timeout_s`, or cannot."""
        give_up = time.monotonic() + timeout_s
        while True:
            left = give_up - time.monotonic()
            if left <= 0:
                raise Unavailable(f"request {self._request} has not ended within {timeout_s:g} s")
            for event in await (self._missed(left) if self._suspicious else self._next(left)):
                self.seq = event.seq
                if self._transcript is not None:
                    self._transcript.feed(event)
                self._newest["state" if event.state else "out"] = event.seq
                self._attempt = max(self._attempt, _attempt(event))
                yield event
                if event.state is not None and event.state.ended:
                    return

    async def _next(self, wait_s: float) -> list[Event]:
        """The next live event, if it follows the last one for sure."""
        silence = asyncio.get_running_loop().call_later(min(wait_s, CATCH_UP_S), self.suspect)
        try:
            stored = await self._queue.get()
        finally:
            silence.cancel()
        if stored is None:
            self._suspicious = True
            return []
        self._held_bytes = max(0, self._held_bytes - len(stored.data))
        if stored.seq <= self.seq:
            return []
        kind = subjects.parse_log(stored.subject).kind
        if stored.seq_before > self._newest[kind]:
            self._suspicious = True
            return []
        event = to_event(stored)
        if self._lacks_claim(event) or self._lacks_tokens(event) or self._may_hide_tokens(event):
            self._suspicious = True
            return []
        return [event]

    def _lacks_claim(self, event: Event) -> bool:
        """Whether these are tokens of an attempt that was not seen to begin: a gap between the two subjects of a log,
        which the sequences of each do not show."""
        return event.out is not None and event.out.attempt > self._attempt

    def _may_hide_tokens(self, event: Event) -> bool:
        """Whether this is a state after which tokens that were lost before it would not be looked for: the sequence
        of the tokens that come next would show the gap, but this one is read past it."""
        if event.state is None or (self._transcript is not None and not self._attempt):
            return False
        return self._transcript is None or not event.state.ended

    def _lacks_tokens(self, event: Event) -> bool:
        """Whether this is an end that names more than was seen: no later event could show that gap."""
        if self._transcript is None or event.state is None or not event.state.ended:
            return False
        self._transcript.feed(event)
        return not self._transcript.complete()

    async def _missed(self, wait_s: float) -> list[Event]:
        """What the log holds after the last event seen; asked again while no router answers."""
        try:
            page = await self._client.read(self._request, after=self.seq)
        except Unavailable:
            if self._client.cut_off:
                raise
            await asyncio.sleep(min(wait_s, RETRY_S))
            return []
        self._suspicious = page.more
        return list(page.events)


def _attempt(event: Event) -> int:
    if event.out is not None:
        return event.out.attempt
    return event.state.decode.attempt if event.state is not None else 0
