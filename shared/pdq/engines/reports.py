"""What the connector, inside the engine's processes, tells the engine's front: lookups, loads and stores.

One Unix stream socket per connector, JSON lines. A report that cannot be sent within SEND_TIMEOUT_S is dropped:
the front bounds every wait by itself, and counts what it did not hear of as not there.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

SEND_TIMEOUT_S = 1.0
SEND_BUFFER_BYTES = 1 << 20
"""The kernel grants less: a hundred reports and more, while the front is busy."""
RECV_BYTES = 1 << 16


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    """The scheduler knows what is cached of a prompt. Times are Unix nanoseconds."""

    run: str
    request: str
    """The engine core's own name of it, which the LMCache server knows."""
    local_tokens: int
    """In the engine's own prefix cache."""
    tier_tokens: int
    """Whole chunks of the prompt that the tier holds."""
    external_tokens: int
    """Those of them that are to be loaded."""
    start_ns: int
    end_ns: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """A load ended. It is whole or it failed."""

    run: str
    ok: bool
    start_ns: int
    end_ns: int


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """One store of tokens `[first, end)` ended; a chunked prefill makes several."""

    run: str
    first: int
    end: int
    ok: bool
    start_ns: int
    end_ns: int


Report = Looked | Loaded | Stored

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Report)


class Reporter:
    """The sending end. Never raises, never blocks longer than SEND_TIMEOUT_S."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def send(self, report: Report) -> None:
        try:
            if self._socket is None:
                self._socket = _connect(self._path)
            self._socket.sendall(_encoder.encode(report) + b"\n")
        except OSError:
            # A line may have gone out in part: only a new connection begins at a line's start again.
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.settimeout(SEND_TIMEOUT_S)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class Inbox:
    """The receiving end, in the front's event loop: hands each report to `deliver`, in order."""

    def __init__(self, deliver: Callable[[Report], None]) -> None:
        self._deliver = deliver
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, bytearray] = {}

    def open(self) -> str:
        """Listen in a private directory. Returns the path that reporters connect to."""
        self._directory = tempfile.TemporaryDirectory(prefix="pdq-")
        path = str(Path(self._directory.name) / "reports")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return path

    def drain(self) -> None:
        """Deliver now what has arrived: a report that was sent before an output is heard before it."""
        self._accept()
        for connection in list(self._connections):
            self._read(connection)

    def close(self) -> None:
        if self._listener is None or self._directory is None:
            return
        loop = asyncio.get_running_loop()
        for connection in [self._listener, *self._connections]:
            loop.remove_reader(connection)
            connection.close()
        self._connections.clear()
        self._directory.cleanup()
        self._listener = self._directory = None

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            self._connections[connection] = bytearray()
            asyncio.get_running_loop().add_reader(connection, self._read, connection)

    def _read(self, connection: socket.socket) -> None:
        while connection in self._connections:
            try:
                data = connection.recv(RECV_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._received(connection, data)

    def _received(self, connection: socket.socket, data: bytes) -> None:
        if not data:
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()
            del self._connections[connection]
            return
        buffer = self._connections[connection]
        buffer += data
        *lines, rest = buffer.split(b"\n")
        self._connections[connection] = rest
        for line in lines:
            self._deliver(_decoder.decode(line))
