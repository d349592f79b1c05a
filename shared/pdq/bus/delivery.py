"""A message that one worker was handed, and the ways to settle it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from pdq.errors import Unavailable
from pdq.subjects import NANOSECONDS

if TYPE_CHECKING:
    from pdq.bus.core import Bus

FIRST_DELAY_S, MOST_DELAY_S, MOST_DOUBLINGS = 1.0, 60.0, 6


class Delivery:
    """One delivery of a queued message. Settle it exactly once: `ack`, `nak` or `term`.

    A word that cannot go out now is not kept for later, when the message may be another's: it is delivered again
    when its ack wait is over, and whoever gets it finds what is done.
    """

    def __init__(self, bus: Bus, subject: str, data: bytes, headers: dict[str, str], reply: str) -> None:
        self.subject = subject
        self.data = data
        self.headers = headers
        self._bus = bus
        self._reply = reply
        # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>; servers may
        # put a domain and an account before the stream.
        fields = reply.split(".")
        offset = 4 if len(fields) > 9 else 2
        self.stream, self.consumer = fields[offset], fields[offset + 1]
        self.num_delivered = int(fields[offset + 2])
        self.seq = int(fields[offset + 3])
        self.stored_ns = int(fields[offset + 5])
        """Broker's time at which the message was stored, Unix nanoseconds."""
        self.num_pending = int(fields[offset + 6])
        """Messages that were waiting behind it, in the same consumer."""

    @property
    def stored_s(self) -> float:
        return self.stored_ns / NANOSECONDS

    async def ack(self) -> None:
        """Done: the queue forgets the message."""
        await self._settle(b"+ACK")

    def give_back(self) -> None:
        """As `nak` without a delay, for whoever cannot wait."""
        with contextlib.suppress(Unavailable):
            self._bus.post(self._reply, b"-NAK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back, to be delivered again after a delay."""
        body = b"-NAK"
        if delay_s > 0:
            body += b" " + json.dumps({"delay": int(delay_s * NANOSECONDS)}).encode()
        await self._settle(body)

    async def nak_for_now(self) -> None:
        """Give it back because something it needs does not answer. The delay grows with its deliveries: what was
        delivered too often is given up, and that must take a quarter of an hour then, not seconds."""
        await self.nak(min(MOST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.num_delivered - 1, MOST_DOUBLINGS)))

    async def term(self, reason: str) -> None:
        """Never deliver it again."""
        await self._settle(b"+TERM " + reason.encode())

    async def in_progress(self) -> None:
        """Start the ack wait anew."""
        await self._settle(b"+WPI")

    async def _settle(self, body: bytes) -> None:
        with contextlib.suppress(Unavailable):
            await self._bus.send(self._reply, body)
