"""The client library's connection, with a short way for what a service does many times for each request.

The library gives each subscription a queue and a task, tries a regular expression for each kind of line it may get, and
wraps each request in a timeout of its own; that was most of what a message cost. Here a message goes from where it is
read straight to whoever listens. Connecting, reconnecting, flushing and closing are the library's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import nats.errors
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from pdq.bus.cancel import Unhurt, heeding_cancel
from pdq.bus.wire import Message

END = b"\r\n"
MESSAGES = (b"MSG ", b"HMSG ")
NO_RESPONDERS = "503"

Take = Callable[[Message], None]
"""Is called where messages are read: it neither waits nor raises."""


class QuickClient(Unhurt):
    """`put`, `listen` and `ask` are what the library's `publish`, `subscribe` and `request` are."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _Reader(self)
        self._pending: list[bytes] = []
        self._takes: dict[int, Take] = {}
        self._asked: dict[str, asyncio.Future[Message]] = {}
        self._numbers = count(1)
        self._answers = ""
        self._writing = False

    async def put(self, subject: str, data: bytes, *, reply: str = "", head: bytes = b"") -> None:
        """As `post`; waits where too much has not gone out yet."""
        self.post(subject, data, reply=reply, head=head)
        if self._pending_data_size > self._max_pending_size:
            with heeding_cancel():
                await self._flush_pending(force_flush=True)

    def post(self, subject: str, data: bytes, *, reply: str = "", head: bytes = b"") -> None:
        """Publish; `head`: its headers, encoded. Raises nats.errors.Error."""
        self._check(subject)
        if reply:
            self._check(reply)
        size = len(head) + len(data)
        if size > self._max_payload:
            raise nats.errors.MaxPayloadError
        if not self.is_connected and self._pending_data_size + size > self._max_pending_size:
            raise nats.errors.OutboundBufferLimitError
        line = f"HPUB {subject} {reply} {len(head)} {size}\r\n" if head else f"PUB {subject} {reply} {size}\r\n"
        command = b"".join((line.encode(), head, data, END))
        self._pending.append(command)
        self._pending_data_size += len(command)
        if not self._writing:
            self._writing = True
            # What else is said in this turn of the event loop goes out in the same write.
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._writing = False
        if not self.is_connected:
            return
        if not self._stream.is_closing() and not self._stream.get_write_buffer_size():
            self._write_pending()
        elif self._flush_queue.empty():
            # It waits until the broker takes more.
            told = asyncio.get_running_loop().create_future()
            told.set_result(None)
            self._flush_queue.put_nowait(told)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        if future is not None and self._stream.is_closing():
            # The connection is lost, and the library has not noticed yet.
            raise nats.errors.ConnectionClosedError
        # The library's would overtake what is still to be written; a flush must not.
        if self.is_connected:
            self._write_pending()
        await super()._send_ping(future)

    @property
    def _stream(self) -> asyncio.WriteTransport:
        stream: asyncio.WriteTransport = self._transport._io_writer.transport
        return stream

    def _write_pending(self) -> None:
        if self._pending:
            self._transport.write(b"".join(self._pending))
            self._pending, self._pending_data_size = [], 0

    async def listen(self, subject: str, take: Take, *, queue: str = "") -> Subscription:
        """Subscribe. What `take` raises is reported, and ends nothing."""
        self._check(subject)
        self._sid += 1
        subscription = Subscription(self, self._sid, subject, queue=queue)
        self._subs[self._sid], self._takes[self._sid] = subscription, take
        await self._send_subscribe(subscription)
        return subscription

    async def ask(self, subject: str, data: bytes, *, timeout_s: float, head: bytes = b"") -> Message:
        """Request, as `post`. Raises nats.errors.TimeoutError, NoRespondersError, or what `post` does."""
        if not self._answers:
            self._answers = self.new_inbox()
            await self.listen(f"{self._answers}.*", self._on_answer)
        loop, number = asyncio.get_running_loop(), str(next(self._numbers))
        answer: asyncio.Future[Message] = loop.create_future()
        self._asked[number] = answer
        timer = loop.call_later(timeout_s, _give_up, answer)
        try:
            await self.put(subject, data, reply=f"{self._answers}.{number}", head=head)
            message = await answer
        finally:
            timer.cancel()
            del self._asked[number]
        if message.status == NO_RESPONDERS:
            raise nats.errors.NoRespondersError
        return message

    def _on_answer(self, message: Message) -> None:
        answer = self._asked.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def deliver(self, sid: int, message: Message) -> None:
        """Give a message that was read to whoever listens."""
        take = self._takes.get(sid)
        try:
            if take is not None:
                take(message)
        except Exception as exc:
            await self._error_cb(exc)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._takes.pop(sid, None)

    def _check(self, subject: str) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        # A space in it would be a word of the protocol.
        if subject.split() != [subject]:
            raise nats.errors.BadSubjectError


class _Reader(Parser):  # type: ignore[misc]
    """Reads messages by itself, and leaves every other line to the library's."""

    buf: bytearray
    needed: int
    """How many bytes must be there before it is worth to look again."""

    async def parse(self, data: bytes = b"") -> None:
        if self.buf:
            self.buf += data
            if len(self.buf) < self.needed:
                return
            data = bytes(self.buf)
        self.buf, self.needed, at = bytearray(), 0, 0
        while (end := data.find(END, at)) >= 0:
            if data.startswith(MESSAGES, at):
                sid, subject, reply, head_size, size = _fields(data[at:end])
                begin = end + len(END)
                after = begin + size + len(END)
                if len(data) < after:
                    self.needed = after - at
                    break
                body = begin + head_size
                message = Message(subject, reply, data[body : begin + size], data[begin:body])
                at = after
                await self.nc.deliver(sid, message)
            else:
                line, at = data[at : end + len(END)], end + len(END)
                await super().parse(line)
        self.buf += data[at:]


def _fields(line: bytes) -> tuple[int, str, str, int, int]:
    """Of a message: subscription, subject, reply, and how many bytes of headers and of all are to come."""
    try:
        kind, subject, sid, *rest = line.decode().split()
        sizes = 2 if kind == "HMSG" else 1
        reply = rest[0] if len(rest) > sizes else ""
        return int(sid), subject, reply, int(rest[-2]) if sizes == 2 else 0, int(rest[-1])
    except (ValueError, IndexError) as exc:
        raise nats.errors.ProtocolError("nats: malformed message") from exc


def _give_up(answer: asyncio.Future[Message]) -> None:
    if not answer.done():
        answer.set_exception(nats.errors.TimeoutError())
