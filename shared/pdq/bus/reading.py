"""What comes over one connection: messages go straight to whoever listens, all else to the client library.

The library reads through a stream: a buffer, a future and a turn of a task for each piece that comes. That was most of
what a message cost.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import nats.errors

from pdq.bus.wire import Message

END = b"\r\n"
MESSAGES = (b"MSG ", b"HMSG ")
PONG = b"PONG\r\n"
MOST_LINE = 1 << 20
"""Bytes of a line; the server's longest, INFO, grows with its cluster to some thousands."""


class Hearer(Protocol):
    """Is told where messages are read: it neither waits nor raises."""

    def deliver(self, sid: int, message: Message) -> None:
        """A message of a subscription."""

    def pong(self) -> None: ...


class Received(asyncio.Protocol):
    """A transport's protocol in the place of `under`, that of the library's stream. `take_over` puts it there."""

    def __init__(self, under: asyncio.StreamReaderProtocol, hearer: Hearer) -> None:
        self._under = under
        self._hearer = hearer
        self._rest = bytearray()
        self._needed = 0
        """How many bytes must be there before it is worth to look again."""

    @classmethod
    def take_over(cls, stream: Any, transport: asyncio.Transport, hearer: Hearer) -> None:
        """stream: the library's asyncio.StreamReader. What it has not read yet is read here."""
        under = transport.get_protocol()
        assert isinstance(under, asyncio.StreamReaderProtocol)
        received = cls(under, hearer)
        transport.set_protocol(received)
        unread, stream._buffer = bytes(stream._buffer), bytearray()
        received.data_received(unread)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
        try:
            read = self._read(data)
        except nats.errors.ProtocolError as exc:
            # The library's reading task ends the connection.
            stream: Any = self._under._stream_reader  # type: ignore[attr-defined]
            stream.set_exception(exc)
            return
        self._rest = bytearray(data[read:]) if read < len(data) else bytearray()

    def _read(self, data: bytes) -> int:
        """All that is whole; returns how many bytes that was."""
        self._needed, at = 0, 0
        while (end := data.find(END, at)) >= 0:
            begin = end + len(END)
            if not data.startswith(MESSAGES, at):
                self._other(data[at:begin])
                at = begin
                continue
            sid, subject, reply, head_size, size = _fields(data[at:end])
            after = begin + size + len(END)
            if len(data) < after:
                self._needed = after - at
                break
            body = begin + head_size
            at = after
            self._hearer.deliver(sid, Message(subject, reply, data[body : begin + size], data[begin:body]))
        if end < 0 and len(data) - at > MOST_LINE:
            raise nats.errors.ProtocolError(f"nats: a line of more than {MOST_LINE} bytes")
        return at

    def _other(self, line: bytes) -> None:
        if line == PONG:
            self._hearer.pong()
        else:
            self._under.data_received(line)

    def eof_received(self) -> bool | None:
        return self._under.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._under.connection_lost(exc)

    def pause_writing(self) -> None:
        self._under.pause_writing()

    def resume_writing(self) -> None:
        self._under.resume_writing()


def _fields(line: bytes) -> tuple[int, str, str, int, int]:
    """Of a message: subscription, subject, reply, and how many bytes of headers and of all are to come."""
    try:
        kind, subject, sid, *rest = line.decode().split()
        sizes = 2 if kind == "HMSG" else 1
        reply = rest[0] if len(rest) > sizes else ""
        return int(sid), subject, reply, int(rest[-2]) if sizes == 2 else 0, int(rest[-1])
    except (ValueError, IndexError) as exc:
        raise nats.errors.ProtocolError("nats: malformed message") from exc
