"""Publishing to a stream without awaiting each acknowledgement, and without losing a message.

A plain publish is silently lost when the server is killed or its ingest queue is full; awaiting every
acknowledgement caps a stream at a few thousand messages a second. So messages carry a reply subject,
acknowledgements are counted, and what stays unacknowledged for a second, or was in flight when the
connection broke, is published again in order, from the first such message on. Messages may therefore be
stored twice: their readers must be able to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import msgspec

from pdq.bus.core import Bus
from pdq.bus.wire import STORE_FULL, Message
from pdq.errors import PdqError, QueueFull, Unavailable

RESEND_AFTER_S = 1.0
TICK_S = 0.25
MAX_PENDING = 1_000
"""Messages of one channel that may wait for their acknowledgement before `send` waits too."""


class Outbox:
    """All counted publishing of one process: one reply subscription, one task. `start`, then `channel`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.inbox()
        self._channels: dict[str, Channel] = {}
        self._made = 0
        self._woken = asyncio.Event()
        self._reconnected = False
        self._task: asyncio.Task[None] | None = None
        self._tick: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        await self._bus.subscribe(f"{self._inbox}.*.*", self._on_ack)
        self._bus.on_reconnect(self._resend_all)
        self._task = asyncio.create_task(self._watch(), name="outbox")

    async def close(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def channel(self, subject: str) -> Channel:
        """A channel to one subject; close it when done."""
        self._made += 1
        name = str(self._made)
        channel = Channel(self, subject, f"{self._inbox}.{name}")
        self._channels[name] = channel
        if self._tick is None:
            self._look_later()
        return channel

    def forget(self, channel: Channel) -> None:
        self._channels.pop(channel.reply.rpartition(".")[2], None)

    async def transmit(self, subject: str, data: bytes, reply: str) -> None:
        """Publish if connected; otherwise the reconnect will."""
        with contextlib.suppress(Unavailable):
            await self._bus.send(subject, data, reply=reply)

    def _on_ack(self, message: Message) -> None:
        _, _, rest = message.subject.partition(self._inbox + ".")
        name, _, number = rest.partition(".")
        channel = self._channels.get(name)
        if channel is not None:
            channel.acknowledge(int(number), message)

    def _resend_all(self) -> None:
        self._reconnected = True
        self._woken.set()

    def _look_later(self) -> None:
        """Look now and then, while there is a channel."""
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._look) if self._channels else None

    def _look(self) -> None:
        overdue = time.monotonic() - RESEND_AFTER_S
        if any(channel.waits_since() <= overdue for channel in self._channels.values()):
            self._woken.set()
        self._look_later()

    async def _watch(self) -> None:
        """Publish again what is overdue, whenever there is some."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            overdue = time.monotonic() - (0 if self._reconnected else RESEND_AFTER_S)
            self._reconnected = False
            for channel in list(self._channels.values()):
                await channel.resend(overdue)


class Channel:
    """Messages to one subject, in order."""

    def __init__(self, outbox: Outbox, subject: str, reply: str) -> None:
        self.reply = reply
        self._outbox = outbox
        self._subject = subject
        self._sent = 0
        self._pending: dict[int, tuple[float, bytes]] = {}
        self._changed = asyncio.Event()
        self._error: PdqError | None = None

    async def send(self, data: bytes) -> None:
        """Publish; returns before it is acknowledged. Raises what a former message failed with."""
        self._raise()
        if len(self._pending) >= MAX_PENDING:
            await self.flush(RESEND_AFTER_S * 10)
        number = self._sent
        self._sent += 1
        self._pending[number] = (time.monotonic(), data)
        await self._outbox.transmit(self._subject, data, f"{self.reply}.{number}")

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything is stored. Raises Unavailable after `timeout_s`, or QueueFull."""
        give_up = time.monotonic() + timeout_s
        while self._pending:
            self._raise()
            self._changed.clear()
            left = give_up - time.monotonic()
            if left <= 0:
                raise Unavailable(f"{len(self._pending)} messages to {self._subject} are not acknowledged")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        self._raise()

    def close(self) -> None:
        self._outbox.forget(self)

    def acknowledge(self, number: int, answer: Message) -> None:
        """Take the stream's answer to one message. Anything but a yes or a definite no is tried again."""
        if answer.status == "503":
            return
        error = msgspec.json.decode(answer.data).get("error")
        if error is not None and error.get("err_code") != STORE_FULL:
            return
        if error is not None:
            self._error = QueueFull(f"{self._subject}: {error.get('description')}")
        self._pending.pop(number, None)
        if self._error is not None or not self._pending:
            self._changed.set()

    def waits_since(self) -> float:
        """When the oldest message was sent that is pending."""
        return next(iter(self._pending.values()))[0] if self._pending else math.inf

    async def resend(self, sent_before: float) -> None:
        """Publish again all that is pending, if the oldest was sent before a time."""
        if self.waits_since() > sent_before:
            return
        now = time.monotonic()
        for number, (_, data) in list(self._pending.items()):
            if number in self._pending:
                self._pending[number] = (now, data)
                await self._outbox.transmit(self._subject, data, f"{self.reply}.{number}")

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
