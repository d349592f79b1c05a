"""A standing pull over the durable consumers of one worker, by priority.

`get` hands out one message at a time and asks for no more than that, so that a worker never holds what it
has no slot for. It first asks each consumer in turn for what is there (a weighted turn, so that a lower
priority is not starved), then waits on all of them. Whoever answers second gets its message back at once.
A broker restart, a deleted consumer or a lost pull ends in a new pull, never in a dead one.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pdq.bus.core import Bus
from pdq.bus.delivery import Delivery
from pdq.errors import Unavailable
from pdq.subjects import NANOSECONDS

log = logging.getLogger("pdq.bus")

EXPIRES_S = 20.0
POLL_TIMEOUT_S = 2.0
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
        self._turns = _Turns(consumers)
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
                order = self._turns.next()
                delivery = await self._poll(order) or await self._wait(order)
                if delivery is not None:
                    self.missing = False
                    return delivery
            except Unavailable as exc:
                log.debug("pull on %s: %s", self._stream, exc)
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Give back what arrived unasked; bounded."""
        if self._polls is not None:
            await self._bus.drain(self._polls)
            self._polls = None
        if self._leftovers:
            await asyncio.wait(self._leftovers, timeout=5)

    async def _poll(self, consumers: Sequence[str]) -> Delivery | None:
        """What is there now, of the first consumer that has something."""
        if self._polls is None:
            self._polls = await self._bus.subscribe(self._poll_inbox, self._on_poll, confirm=False)
        body = json.dumps({"batch": 1, "no_wait": True}).encode()
        for consumer in consumers:
            self._polled = asyncio.get_running_loop().create_future()
            try:
                await self._bus.send(self._next(consumer), body, reply=self._poll_inbox)
                await asyncio.wait({self._polled}, timeout=POLL_TIMEOUT_S)
            except asyncio.CancelledError:
                if self._polled.done() and (unwanted := self._polled.result()) is not None:
                    self._later(unwanted.nak())
                self._polled.cancel()
                raise
            if not self._polled.done():
                self._polled.cancel()
                raise Unavailable(f"no answer from consumer {consumer}")
            if (delivery := self._polled.result()) is not None:
                return delivery
        return None

    async def _on_poll(self, message: Msg) -> None:
        """An answer to the poll under way; one that comes too late is given back."""
        delivery = self._delivery(message)
        if self._polled is not None and not self._polled.done():
            self._polled.set_result(delivery)
        elif delivery is not None:
            await delivery.nak()

    async def _wait(self, consumers: Sequence[str]) -> Delivery | None:
        first = _First(self, len(consumers))
        inbox = self._bus.inbox()
        subscription = await self._bus.subscribe(inbox, first.on_message, confirm=False)
        forget = self._bus.on_reconnect(first.give_up)
        try:
            body = json.dumps({"batch": 1, "expires": int(EXPIRES_S * NANOSECONDS)}).encode()
            for consumer in consumers:
                await self._bus.send(self._next(consumer), body, reply=inbox)
            delivery = await first.result(EXPIRES_S + POLL_TIMEOUT_S)
        finally:
            forget()
            self._later(self._finish(first, subscription))
        if first.troubled:
            self.missing = True
            await asyncio.sleep(RETRY_S)
        return delivery

    def _next(self, consumer: str) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}"

    def _delivery(self, message: Msg) -> Delivery | None:
        """The delivery in a message, or None where it is the server's word on the pull: that has no reply subject.

        Its headers tell nothing: a client may give its message a `Status` of its own.
        """
        if not message.reply:
            return None
        return Delivery(self._bus, message.subject, bytes(message.data), dict(message.headers or {}), message.reply)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._leftovers.add(task)
        task.add_done_callback(self._leftovers.discard)

    async def _finish(self, first: _First, subscription: Subscription) -> None:
        """Take the interest away, so that the server drops the pulls still waiting; give back the rest."""
        await first.abandon()
        await self._bus.drain(subscription)


class _First:
    """The first message to arrive on an inbox; later ones are given back."""

    def __init__(self, puller: Puller, num_pulls: int) -> None:
        self.troubled = False
        self._puller = puller
        self._open_pulls = num_pulls
        self._taken = False
        self._future: asyncio.Future[Delivery | None] = asyncio.get_running_loop().create_future()

    async def result(self, timeout_s: float) -> Delivery | None:
        """The message, or None when all pulls ended without one."""
        done, _ = await asyncio.wait({self._future}, timeout=timeout_s)
        if not done:
            return None
        self._taken = True
        return self._future.result()

    async def on_message(self, message: Msg) -> None:
        delivery = self._puller._delivery(message)
        if delivery is None:
            self._on_status(dict(message.headers or {}))
        elif self._future.done():
            await delivery.nak()
        else:
            self._future.set_result(delivery)

    def _on_status(self, headers: dict[str, str]) -> None:
        """One pull has ended. Where its consumer is in trouble the others end too: all are asked anew."""
        status = headers.get("Status")
        if status == "503" or (status == "409" and "Exceeded" not in headers.get("Description", "")):
            self.troubled = True
        self._open_pulls -= 1
        if self.troubled or self._open_pulls <= 0:
            self.give_up()

    def give_up(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def abandon(self) -> None:
        """Give back a message that nobody took (the caller was cancelled)."""
        if self._taken:
            return
        self.give_up()
        delivery = self._future.result()
        if delivery is not None:
            await delivery.nak()


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
