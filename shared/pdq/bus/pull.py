"""A standing pull over the durable consumers of one worker, by priority.

`get` hands out one message at a time and asks for no more than that, so that a worker never holds what it
has no slot for. It first asks each consumer in turn for what is there (a weighted turn, so that a lower
priority is not starved), then waits on all of them, for as long as all are empty and it is asked again at
once. A message that comes when nobody asks any more is given back.
A broker restart, a deleted consumer or a lost pull ends in a new pull, never in a dead one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence

import msgspec
from nats.aio.subscription import Subscription

from pdq.bus.core import Bus
from pdq.bus.delivery import Delivery
from pdq.bus.standing import Standing, delivery_of, pull_subject
from pdq.bus.wire import Message
from pdq.errors import Unavailable

log = logging.getLogger("pdq.bus")

POLL = msgspec.json.encode({"batch": 1, "no_wait": True})
POLL_TIMEOUT_S = 2.0
LINGER_S = 0.02
"""How long open pulls wait for the next `get` after a message."""
RETRY_S = 0.25


class Puller:
    """Messages of several durable consumers of one stream, most urgent first.

    consumers: names, most urgent first; each gets half the first tries of the one before it.
    """

    def __init__(self, bus: Bus, stream: str, consumers: Sequence[str]) -> None:
        self.missing = False
        """True while the broker says that a consumer is not there, or has no leader."""
        self._bus = bus
        self._stream = stream
        self._consumers = consumers
        self._turns = _Turns(consumers)
        self._standing: Standing | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._leftovers: set[asyncio.Task[None]] = set()
        self._poll_inbox = bus.inbox()
        self._polls: Subscription | None = None
        self._polled: asyncio.Future[Delivery | None] | None = None

    async def get(self) -> Delivery:
        """The next message; waits for it without bound, so callers race it against their stop signal.

        Safe to cancel: a message that arrives meanwhile is given back.
        """
        while True:
            try:
                delivery = await self._next()
                if delivery is not None:
                    self.missing = False
                    return delivery
            except Unavailable as exc:
                log.debug("pull on %s: %s", self._stream, exc)
                await asyncio.sleep(RETRY_S)

    async def _next(self) -> Delivery | None:
        if self._standing is None:
            order = self._turns.next()
            if (delivery := await self._poll(order)) is not None:
                return delivery
            self._standing = Standing(self._bus, self._stream, self._consumers)
        return await self._wait(self._standing)

    def rest(self) -> None:
        """Say that no `get` follows soon: messages are left to others, and what came already is given back."""
        standing, self._standing = self._standing, None
        if standing is not None:
            self._later(standing.close())

    async def close(self) -> None:
        """Give back what arrived unasked; bounded."""
        self.rest()
        if self._polls is not None:
            await self._bus.drain(self._polls)
            self._polls = None
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=5)

    async def _poll(self, consumers: Sequence[str]) -> Delivery | None:
        """What is there now, of the first consumer that has something."""
        if self._polls is None:
            self._polls = await self._bus.subscribe(self._poll_inbox, self._on_poll, confirm=False)
        for consumer in consumers:
            self._polled = asyncio.get_running_loop().create_future()
            try:
                await self._bus.send(pull_subject(self._stream, consumer), POLL, reply=self._poll_inbox)
                await asyncio.wait({self._polled}, timeout=POLL_TIMEOUT_S)
            except asyncio.CancelledError:
                if self._polled.done() and (unwanted := self._polled.result()) is not None:
                    unwanted.give_back()
                self._polled.cancel()
                raise
            if not self._polled.done():
                self._polled.cancel()
                raise Unavailable(f"no answer from consumer {consumer}")
            if (delivery := self._polled.result()) is not None:
                return delivery
        return None

    def _on_poll(self, message: Message) -> None:
        """An answer to the poll under way; one that comes too late is given back."""
        delivery = delivery_of(self._bus, message)
        if self._polled is not None and not self._polled.done():
            self._polled.set_result(delivery)
        elif delivery is not None:
            delivery.give_back()

    async def _wait(self, standing: Standing) -> Delivery | None:
        """The next message of open pulls, which stay open while all queues are empty and the next message is
        asked for at once."""
        if self._lingering is not None:
            self._lingering.cancel()
        delivery = None
        try:
            delivery = await standing.next()
        finally:
            if delivery is None or (delivery.num_pending and not standing.holding):
                self.rest()
            else:
                self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self.rest)
        if delivery is None and standing.troubled:
            self.missing = self.missing or standing.missing
            await asyncio.sleep(RETRY_S)
        return delivery

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)


class _Turns:
    """Which consumer is asked first: smooth weighted round robin with weights 2^(n-1) … 1."""

    def __init__(self, consumers: Sequence[str]) -> None:
        self._weights = {name: 1 << (len(consumers) - 1 - place) for place, name in enumerate(consumers)}
        self._credit = dict.fromkeys(consumers, 0)

    def next(self) -> list[str]:
        """All consumers: the one whose turn it is, then the others by urgency."""
        for name, weight in self._weights.items():
            self._credit[name] += weight
        first = max(self._credit, key=lambda name: self._credit[name])
        self._credit[first] -= sum(self._weights.values())
        return [first, *(name for name in self._weights if name != first)]
