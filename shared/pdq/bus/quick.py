"""The client library's connection, with a short way for what a service does many times for each request.

The library gives each subscription a queue and a task, tries a regular expression for each kind of line it may get,
wraps each request in a timeout of its own, and wakes a task for each write; that was most of what a message cost. Here
a message goes from where it is read straight to whoever listens. Connecting, reconnecting and closing are the
library's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.command import sub_cmd, unsub_cmd

from pdq.bus.cancel import heeding_cancel
from pdq.bus.reading import END, Received
from pdq.bus.wire import Message

NO_RESPONDERS = "503"
PING = b"PING\r\n"

Take = Callable[[Message], None]
"""Is called where messages are read: it neither waits nor raises."""


class QuickClient(Client):  # type: ignore[misc]
    """`put`, `listen` and `ask` are what the library's `publish`, `subscribe` and `request` are."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: list[bytes] = []
        self._takes: dict[int, Take] = {}
        self._asked: dict[str, asyncio.Future[Message]] = {}
        self._numbers = count(1)
        self._answers = ""
        self._writing = False
        self._reporting: set[asyncio.Task[None]] = set()

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        Received.take_over(self._transport._io_reader, self._stream, self)

    def deliver(self, sid: int, message: Message) -> None:
        """Give a message that was read to whoever listens."""
        take = self._takes.get(sid)
        try:
            if take is not None:
                take(message)
        except Exception as exc:
            task = asyncio.get_running_loop().create_task(self._error_cb(exc))
            self._reporting.add(task)
            task.add_done_callback(self._reporting.discard)

    def pong(self) -> None:
        """The answer to the first ping; whoever waited for it may have given it up."""
        self._pings_outstanding = 0
        if self._pongs:
            answer = self._pongs.pop(0)
            if not answer.done():
                answer.set_result(True)

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
        self._say(b"".join((line.encode(), head, data, END)))

    def _say(self, command: bytes) -> None:
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
        stream = self._stream
        if not stream.is_closing() and not stream.get_write_buffer_size():
            self._write_pending(stream)
        elif self._flush_queue.empty():
            # It waits until the broker takes more.
            told = asyncio.get_running_loop().create_future()
            told.set_result(None)
            self._flush_queue.put_nowait(told)

    async def _send_subscribe(self, sub: Subscription) -> None:
        self._say(sub_cmd(sub._subject, sub._queue, sub._id))

    async def _send_unsubscribe(self, sid: int, limit: int = 0) -> None:
        self._say(unsub_cmd(sid, limit))

    async def flush(self, timeout: float = 10) -> None:
        """See the library's. Raises nats.errors.Error."""
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if self._reading_task is None or self._reading_task.done():
            # The event loop is ending: there will be no answer.
            await self._flush_pending()
            return
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(timeout, _give_up, answer, nats.errors.FlushTimeoutError())
        try:
            await self._send_ping(answer)
            await answer
        finally:
            timer.cancel()
            answer.cancel()

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        if not self.is_connected:
            await super()._send_ping(future)
            return
        if future is not None and self._stream.is_closing():
            # The connection is lost, and the library has not noticed yet.
            raise nats.errors.ConnectionClosedError
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        # At once, and after all that was said before it: what is not written may go out over the next connection.
        self._pending.append(PING)
        self._write_pending(self._stream)

    @property
    def _stream(self) -> asyncio.Transport:
        stream: asyncio.Transport = self._transport._io_writer.transport
        return stream

    def _write_pending(self, stream: asyncio.Transport) -> None:
        if self._pending:
            stream.write(b"".join(self._pending))
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
        timer = loop.call_later(timeout_s, _give_up, answer, nats.errors.TimeoutError())
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

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._takes.pop(sid, None)

    def _check(self, subject: str) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        # A space in it would be a word of the protocol.
        if subject.split() != [subject]:
            raise nats.errors.BadSubjectError


def _give_up(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
