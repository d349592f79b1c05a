"""How messages are read from the wire, and how headers are written to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.errors import ProtocolError
from pdq.bus.quick import _Reader
from pdq.bus.wire import Message, encode_headers, parse_headers

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
    "ping",
    (12, "a.b", "_INBOX.x.1", b"", {}),
    (3, "a.b", "", b"MSG \r\n1", {"X": "12"}),
    "pong",
    (3, "a", "reply.here", b"", {"Status": "503"}),
]


class Heard:
    """What a connection is told by what reads for it."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    async def deliver(self, sid: int, message: Message) -> None:
        self.heard.append((sid, message.subject, message.reply, message.data, message.headers))

    async def _process_ping(self) -> None:
        self.heard.append("ping")

    async def _process_pong(self) -> None:
        self.heard.append("pong")


@pytest.mark.parametrize("size", range(1, len(WIRE) + 1))
async def test_bytes_may_come_in_any_pieces(size: int) -> None:
    connection = Heard()
    reader = _Reader(connection)
    for at in range(0, len(WIRE), size):
        await reader.parse(WIRE[at : at + size])
    assert connection.heard == HEARD
    assert not reader.buf


@pytest.mark.parametrize("line", [b"MSG a 1\r\n", b"MSG a b 1\r\nx\r\n", b"HMSG a 1 1\r\n\r\n", b"MUSIC\r\n"])
async def test_what_is_no_protocol_is_an_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await _Reader(Heard()).parse(line)


@given(st.dictionaries(st.from_regex(r"[A-Za-z-]{1,12}", fullmatch=True), st.text(max_size=30), min_size=1))
def test_a_value_of_a_header_is_never_more_than_a_value(headers: dict[str, str]) -> None:
    read = parse_headers(encode_headers(headers))
    assert read == {name: value.strip().replace("\r", " ").replace("\n", " ") for name, value in headers.items()}


def test_a_status_has_words_of_its_own() -> None:
    raw = b"NATS/1.0 409 Exceeded MaxWaiting\r\nNats-Pending: 1\r\n\r\n"
    expected = {"Status": "409", "Description": "Exceeded MaxWaiting", "Nats-Pending": "1"}
    assert parse_headers(raw) == expected
