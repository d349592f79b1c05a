"""A client's connection: uvicorn's own, with bounds for what comes before a request's body, and refusals in JSON.

What it adds: a limit for the size of a request's line and headers and for the time that they take, one value for each
header that decides whose or which request it is, and upgrades that are ignored rather than half understood.
"""

from __future__ import annotations

import asyncio
from array import array
from http import HTTPStatus
from typing import Any

import httptools
from pdq.errors import PdqError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pdq_gateway.errors import Failed, failed, refusal

LARGEST_HEAD_BYTES = 65_536
"""Of a request's line and headers."""
ONCE = (b"host", b"authorization", b"idempotency-key", b"last-event-id", b"content-type")
"""Two readers may take different ones of two values."""


class Connection(HttpToolsProtocol):
    head_s = 60.0
    """How long a request's line and headers may take to come, from their first byte on; the first may be so late."""

    _head = False
    """Whether a request's line or headers have come in part."""
    _head_bytes = 0
    _late: asyncio.TimerHandle | None = None
    _refused: Failed | None = None
    _upgrade = False
    _again = False
    """A head is parsed that was handled before."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.parser = _Parser(self)

    # ---- asyncio's

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_late()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        head = self._head
        super().data_received(data)
        if self.transport.is_closing():
            self._unset_late()
        elif head and self._head and self._take_head(len(data)):
            self._refuse(_too_large())
        elif self._head or self.cycle is None or self.cycle.response_complete:
            self._expect_head()

    # ---- the parser's

    def on_message_begin(self) -> None:
        if not self._again:
            self._head, self._head_bytes = True, 0
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._again:
            self._check_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._again:
            self._check_head(len(name) + len(value))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._again:
            return
        self._head = False
        self._unset_late()
        self._check_once()
        self._upgrade = self.parser.should_upgrade()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._upgrade:
            super().on_message_complete()

    # ---- uvicorn's

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed ends here."""
        self._refuse(self._refused or failed("invalid_request", "what was sent is not HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: `_Parser` went on."""

    # ---- our own

    def ignore_upgrade(self, rest: bytes) -> None:
        """Go on with a request that asked for another protocol. Its parser takes no body of such a one, and would take
        it for the next request: a new one does that knows only of the body. `rest`: what came after its head."""
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
        self._upgrade = False
        self.parser = _Parser(self)
        self._again = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing or [b"content-length: 0\r\n"]) + b"\r\n")
        self._again = False
        self.parser.feed_data(rest)

    def _check_once(self) -> None:
        names = [name for name, _ in self.headers]
        twice = [name.decode() for name in ONCE if names.count(name) > 1]
        if twice:
            self._stop(failed("invalid_value", f"{twice[0]} is given more than once", twice[0]))
        if b"host" not in names and self.parser.get_http_version() == "1.1":
            self._stop(failed("invalid_request", "Host is missing; HTTP/1.1 requires it", "host"))

    def _check_head(self, size: int) -> None:
        if self._take_head(size):
            self._stop(_too_large())

    def _take_head(self, size: int) -> bool:
        self._head_bytes += size
        return self._head_bytes > LARGEST_HEAD_BYTES

    def _stop(self, refused: Failed) -> None:
        """The parser wraps what a callback raises, and uvicorn then calls `send_400_response`."""
        self._refused = refused
        raise refused

    def _refuse(self, error: PdqError) -> None:
        """Answer and close. Within an answer that has begun nothing can be said."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            refused = refusal(error)
            phrase = HTTPStatus(refused.status).phrase
            head = f"HTTP/1.1 {refused.status} {phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(refused.body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + refused.body)
        self._unset_late()
        self.transport.close()

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self._is_late)

    def _is_late(self) -> None:
        self._late = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()
        elif self._head:
            self._refuse(failed("request_timeout", f"the headers did not come within {self.head_s:g} s"))
        else:
            self.transport.close()

    def _unset_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


_FRAMING = (b"content-length", b"transfer-encoding")


class _Parser(httptools.HttpRequestParser):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        # As uvicorn has it: a request that closes is answered, whatever comes after it.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._connection = connection

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._connection.ignore_upgrade(bytes(data[exc.args[0] :]))


def _too_large() -> Failed:
    message = f"the request's line and headers are over the limit of {LARGEST_HEAD_BYTES} bytes"
    return failed("headers_too_large", message)


def connection_with(head_s: float) -> type[Connection]:
    return type("Connection", (Connection,), {"head_s": head_s})
