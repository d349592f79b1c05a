"""Open pulls on several consumers that have nothing now: whatever comes first is taken.

They stay open from one message to the next, so that a worker that waits asks once for each message it gets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
from nats.aio.subscription import Subscription

from pdq.bus.core import Bus
from pdq.bus.delivery import Delivery
from pdq.bus.wire import Message
from pdq.subjects import NANOSECONDS

EXPIRES_S = 20.0
LATE_S = 2.0
"""How long the server may take to say that a pull has expired."""
SPREAD = 0.25
"""By chance a pull expires so much sooner: whoever began together must not ask anew together, for the server goes
through all the pulls that wait at each that comes."""


def pull_subject(stream: str, consumer: str) -> str:
    return f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"


def delivery_of(bus: Bus, message: Message) -> Delivery | None:
    """The delivery in a message, or None where it is the server's word on the pull: that has no reply subject.

    Its headers tell nothing: a client may give its message a `Status` of its own.
    """
    if not message.reply:
        return None
    return Delivery(bus, message.subject, message.data, message.headers, message.reply)


def pull() -> bytes:
    """What one pull asks for."""
    expires_s = EXPIRES_S * random.uniform(1 - SPREAD, 1)
    return msgspec.json.encode({"batch": 1, "expires": int(expires_s * NANOSECONDS)})


class Standing:
    """`next` until it gives None or raises, then `close`. consumers: names, most urgent first."""

    def __init__(self, bus: Bus, stream: str, consumers: Sequence[str]) -> None:
        self.troubled = False
        """The broker said that a consumer is not there, has no leader, or takes no more pulls."""
        self.missing = False
        """... and not that last."""
        self._bus = bus
        self._subjects = {consumer: pull_subject(stream, consumer) for consumer in consumers}
        self._inbox = bus.inbox()
        self._pull = pull()
        self._open: set[str] = set()
        self._arrived: dict[str, Delivery] = {}
        self._over = False
        self._closed = False
        self._changed = asyncio.Event()
        self._subscription: Subscription | None = None
        # Pulls do not outlive a connection.
        self._forget = bus.on_reconnect(self._end)

    @property
    def holding(self) -> bool:
        """Whether a message has come that `next` has not given yet."""
        return bool(self._arrived)

    async def next(self) -> Delivery | None:
        """The most urgent of the messages that came, or the next to come. None: begin anew, with new pulls.

        Safe to cancel: what arrives meanwhile is there for the next call. Raises Unavailable.
        """
        if not self._arrived and not self._over:
            await self._ask()
            self._changed.clear()
            await self._wait()
        for consumer in self._subjects:
            if (delivery := self._arrived.pop(consumer, None)) is not None:
                return delivery
        return None

    async def close(self) -> None:
        """Take the interest away, so that the server drops the open pulls; give back what came; bounded."""
        self._closed = True
        self._forget()
        for delivery in self._arrived.values():
            await delivery.nak()
        if self._subscription is not None:
            await self._bus.drain(self._subscription)

    async def _ask(self) -> None:
        if self._subscription is None:
            self._subscription = await self._bus.subscribe(self._inbox, self._on_message, confirm=False)
        for consumer, subject in self._subjects.items():
            if consumer not in self._open:
                self._open.add(consumer)
                await self._bus.send(subject, self._pull, reply=self._inbox)

    async def _wait(self) -> None:
        timer = asyncio.get_running_loop().call_later(EXPIRES_S + LATE_S, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    def _on_message(self, message: Message) -> None:
        delivery = delivery_of(self._bus, message)
        if delivery is None:
            self._on_status(message.headers)
        elif self._closed or delivery.consumer in self._arrived:
            delivery.give_back()
        else:
            self._open.discard(delivery.consumer)
            self._arrived[delivery.consumer] = delivery
            self._changed.set()

    def _on_status(self, headers: dict[str, str]) -> None:
        """A pull has ended without a message: it expired, or its consumer is in trouble. All are made anew."""
        status = headers.get("Status")
        self.troubled = self.troubled or status in ("503", "409")
        full = status == "409" and "Exceeded" in headers.get("Description", "")
        self.missing = self.missing or (self.troubled and not full)
        self._end()

    def _end(self) -> None:
        self._over = True
        self._changed.set()
