"""How messages are read from the wire, and how headers are written to it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import ProtocolError
from pdq.bus.reading import MOST_LINE, Received
from pdq.bus.wire import Message, Stored, encode_headers, parse_headers

WIRE = (
    b"MSG a.b 1 5\r\nhello\r\n"
    b"PING\r\n"
    b"MSG a.b 12 _INBOX.x.1 0\r\n\r\n"
    b"HMSG a.b 3 19 26\r\nNATS/1.0\r\nX: 12\r\n\r\nMSG \r\n1\r\n"
    b"PONG\r\n"
    b"HMSG a 3 reply.here 16 16\r\nNATS/1.0 503\r\n\r\n\r\n"
    b"+OK\r\n"
)
HEARD = [
    (1, "a.b", "", b"hello", {}),
    (12, "a.b", "_INBOX.x.1", b"", {}),
    (3, "a.b", "", b"MSG \r\n1", {"X": "12"}),
    "pong",
    (3, "a", "reply.here", b"", {"Status": "503"}),
]


class Heard:
    """What a connection is told by what reads for it."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def deliver(self, sid: int, message: Message) -> None:
        self.heard.append((sid, message.subject, message.reply, message.data, message.headers))

    def pong(self) -> None:
        self.heard.append("pong")


class Read:
    """A transport whose bytes are read, and the library's stream beneath."""

    def __init__(self, unread: bytes = b"") -> None:
        self.stream = asyncio.StreamReader()
        self.stream.feed_data(unread)
        self.connection = Heard()
        self._protocol: asyncio.Protocol = asyncio.StreamReaderProtocol(self.stream)
        Received.take_over(self.stream, self, self.connection)  # type: ignore[arg-type]

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def read(self, data: bytes) -> None:
        self._protocol.data_received(data)

    async def rest(self) -> bytes:
        """What the library reads."""
        self._protocol.connection_lost(None)
        return await self.stream.read()


@pytest.mark.parametrize("size", range(1, len(WIRE) + 1))
async def test_bytes_may_come_in_any_pieces(size: int) -> None:
    read = Read()
    for at in range(0, len(WIRE), size):
        read.read(WIRE[at : at + size])
    assert read.connection.heard == HEARD
    assert await read.rest() == b"PING\r\n+OK\r\n"


@pytest.mark.parametrize("size", range(0, len(WIRE) + 1))
async def test_what_the_library_has_not_read_is_read_first(size: int) -> None:
    read = Read(unread=WIRE[:size])
    read.read(WIRE[size:])
    assert read.connection.heard == HEARD
    assert await read.rest() == b"PING\r\n+OK\r\n"


@pytest.mark.parametrize("line", [b"MSG a 1\r\n", b"MSG a b 1\r\nx\r\n", b"HMSG a 1 1\r\n\r\n"])
async def test_what_is_no_protocol_ends_the_librarys_reading(line: bytes) -> None:
    read = Read()
    read.read(line)
    assert not read.connection.heard
    with pytest.raises(ProtocolError):
        await read.stream.read(1)


async def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    read = Read()
    read.read(b"INFO " + b"x" * (MOST_LINE - 5))
    read.read(b"x")
    with pytest.raises(ProtocolError):
        await read.stream.read(1)


async def test_a_long_message_is_no_long_line() -> None:
    read = Read()
    body = b"x" * (2 * MOST_LINE)
    wire = b"MSG a 1 %d\r\n%b\r\n" % (len(body), body)
    read.read(wire[: MOST_LINE + 100])
    read.read(wire[MOST_LINE + 100 :])
    assert read.connection.heard == [(1, "a", "", body, {})]


async def test_what_is_said_of_the_connection_reaches_the_library() -> None:
    read = Read()
    read.read(b"MUSIC\r\n-ERR 'Stale Connection'\r\n")
    assert await read.rest() == b"MUSIC\r\n-ERR 'Stale Connection'\r\n"


@given(st.dictionaries(st.from_regex(r"[A-Za-z-]{1,12}", fullmatch=True), st.text(max_size=30), min_size=1))
def test_a_value_of_a_header_is_never_more_than_a_value(headers: dict[str, str]) -> None:
    read = parse_headers(encode_headers(headers))
    assert read == {name: value.strip().replace("\r", " ").replace("\n", " ") for name, value in headers.items()}


def message(*lines: str) -> Message:
    return Message("a", "", b"", "\r\n".join(["NATS/1.0", *lines, "", ""]).encode())


@pytest.mark.parametrize(
    ("lines", "sequence"),
    [
        (["Nats-Stream: S", "Nats-Sequence: 17", "Nats-Last-Sequence: 3"], 17),
        (["Nats-Stream: S", "Nats-Last-Sequence: 3", "Nats-Sequence: 17"], 17),
        (["Nats-Sequence: 9", "Nats-Sequence: 17"], 17),
        (["Nats-Last-Sequence: 3"], 0),
        (["Nats-Sequence: "], 0),
        (["Nats-Sequence: -1"], 0),
        (["Nats-Sequence: 1_7"], 0),
        (["X: Nats-Sequence: 17"], 0),
        ([], 0),
    ],
)
def test_a_live_copy_tells_its_sequence(lines: list[str], sequence: int) -> None:
    assert message(*lines).sequence == sequence


def test_what_has_no_headers_is_no_live_copy() -> None:
    assert Message("a", "", b"\r\nNats-Sequence: 17\r\n", b"").sequence == 0


def test_a_live_copys_headers_are_read_when_they_are_asked_for() -> None:
    live = Stored("a", 17, b"", message("Nats-Sequence: 17", "Nats-Last-Sequence: 3"))
    assert (live.seq, live.seq_before, live.headers["Nats-Sequence"]) == (17, 3, "17")


def test_a_status_has_words_of_its_own() -> None:
    raw = b"NATS/1.0 409 Exceeded MaxWaiting\r\nNats-Pending: 1\r\n\r\n"
    expected = {"Status": "409", "Description": "Exceeded MaxWaiting", "Nats-Pending": "1"}
    assert parse_headers(raw) == expected
