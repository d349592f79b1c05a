"""What JetStream says, as it comes over the wire: messages, acknowledgements, errors."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from pdq.errors import QueueFull, Rejected, Unavailable, WrongSequence

# JetStream error codes (docs.nats.io, "JetStream API errors"), as met on server 2.15.
NO_STREAM, NO_CONSUMER, NO_MESSAGE, DELETE_FAILED = 10059, 10014, 10037, 10057
WRONG_LAST_SEQUENCE = (10071, 10164)
STORE_FULL, TOO_LARGE, DUPLICATE_IN_PROCESS, OTHER_STREAM = 10077, 10054, 10158, 10060
NOT_NOW = frozenset({10008, 10009, DUPLICATE_IN_PROCESS})
"""A cluster without a leader for the moment, or the same publish under way elsewhere: ask again."""

PROTOCOL = "NATS/1.0"
USUAL = frozenset(
    {
        "Nats-Expected-Last-Subject-Sequence",
        "Nats-Last-Sequence",
        "Nats-Msg-Id",
        "Nats-Sequence",
        "Nats-Stream",
        "Nats-Subject",
        "Nats-Time-Stamp",
        "traceparent",
    }
)
"""Names of headers that need no look."""
LIVE = b"\r\nNats-Sequence: "
BREAKS = {ord(each): " " for each in "\r\n"}
SPACES = " \t\n\r\x0b\x0c"

RETRY_AFTER_S = 1.0
"""A hint: who publishes into a full stream cannot tell how long the oldest message waits."""


class Message:
    """A message as it comes over the wire. Its headers are read when they are first asked for."""

    __slots__ = ("_head", "_headers", "data", "reply", "subject")

    def __init__(self, subject: str, reply: str, data: bytes, head: bytes) -> None:
        """head: all headers, with the line before them; empty: there are none."""
        self.subject = subject
        self.reply = reply
        self.data = data
        self._head = head
        self._headers: dict[str, str] | None = None

    @property
    def headers(self) -> dict[str, str]:
        if self._headers is None:
            self._headers = parse_headers(self._head) if self._head else {}
        return self._headers

    @property
    def sequence(self) -> int:
        """Of a live copy, in its stream; 0: it is none. The broker's word comes after any of a publisher's."""
        begin = self._head.rfind(LIVE) + len(LIVE)
        number = self._head[begin : self._head.find(b"\r", begin)] if begin >= len(LIVE) else b""
        return int(number) if number.isdigit() else 0

    @property
    def status(self) -> str:
        """The server's word in place of an answer; empty: there is none."""
        return self.headers.get("Status", "")


class Stored:
    """A message read back from a stream, or a live copy of it, whose headers are read when they are first asked for."""

    __slots__ = ("_headers", "data", "seq", "subject", "time_s")

    def __init__(
        self, subject: str, seq: int, data: bytes, headers: dict[str, str] | Message, time_s: float = 0.0
    ) -> None:
        """headers: themselves, or the message that has them."""
        self.subject = subject
        self.seq = seq
        self.data = data
        self.time_s = time_s
        self._headers = headers

    @property
    def headers(self) -> dict[str, str]:
        return self._headers.headers if isinstance(self._headers, Message) else self._headers

    @property
    def seq_before(self) -> int:
        """Of a live copy: sequence of the message before it on the same subject, 0 if it is the first."""
        return int(self.headers.get("Nats-Last-Sequence", "0"))

    @property
    def num_after(self) -> int:
        """Of a message read by subject: how many of that subject follow it."""
        return int(self.headers.get("Nats-Num-Pending", "0"))


class Ack(NamedTuple):
    """JetStream's acknowledgement of a publish."""

    stream: str
    seq: int
    duplicate: bool


class ApiError(Exception):
    """An error JetStream's API answered with; mapped by the caller that knows what it means."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(description)
        self.code = code


def answer_of(data: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(data)
    error = answer.get("error")
    if error:
        raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    return answer


def publish_error(subject: str, exc: ApiError) -> Exception:
    if exc.code in WRONG_LAST_SEQUENCE:
        return WrongSequence(f"{subject}: {exc}")
    if exc.code == STORE_FULL:
        return QueueFull(
            f"publish to {subject}: refused for now: {exc}; try again in {RETRY_AFTER_S:g} s",
            per_subject="per subject" in str(exc),
            retry_after_s=RETRY_AFTER_S,
        )
    if exc.code == TOO_LARGE:
        return Rejected(f"publish to {subject}: {exc}", code="payload_too_large")
    return Unavailable(f"publish to {subject}: {exc} ({exc.code})")


def direct(headers: dict[str, str], data: bytes) -> Stored:
    return Stored(
        headers["Nats-Subject"],
        int(headers["Nats-Sequence"]),
        bytes(data),
        headers,
        seconds(headers["Nats-Time-Stamp"]),
    )


def seconds(stamp: str) -> float:
    """RFC 3339 with up to nanoseconds, to Unix seconds."""
    head, _, fraction = stamp.rstrip("Z").partition(".")
    whole = datetime.fromisoformat(head + "+00:00").timestamp()
    return whole + (float(f"0.{fraction}") if fraction else 0.0)


def encode_headers(headers: Mapping[str, str] | None) -> bytes:
    """Headers as they go over the wire, where they count as payload. A line break within becomes a space."""
    if not headers:
        return b""
    lines = [_unbroken(f"{name}: {value.strip()}") for name, value in headers.items() if name]
    return "\r\n".join([PROTOCOL, *lines, "", ""]).encode()


def _unbroken(line: str) -> str:
    return line.translate(BREAKS) if "\r" in line or "\n" in line else line


def parse_headers(raw: bytes) -> dict[str, str]:
    """Headers with the line before them, which names the protocol, and may tell a status."""
    line, _, lines = raw.partition(b"\r\n")
    status, _, description = line[len(PROTOCOL) :].decode("utf-8", "replace").strip().partition(" ")
    told = {"Status": status} if status else {}
    if description:
        told["Description"] = description
    return told | parse_header_lines(lines)


def parse_header_lines(raw: bytes) -> dict[str, str]:
    """Lines that are no header, or whose name is not ASCII or has a space in it, are passed over."""
    headers = {}
    for line in raw.decode("utf-8", "replace").split("\r\n"):
        name, found, value = line.partition(":")
        if name not in USUAL:
            name = name.strip(SPACES)
            found = found if name.isascii() and len(name.split()) < 2 else ""
        if found:
            headers[name] = value.strip(SPACES)
    return headers
