"""The chunks of KV in a pool's store, as whoever can write there could change them."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.error import HTTPError
from urllib.parse import quote

from tests.e2e.stores import PASSWORD

TIMEOUT_S = 10.0
DIRECTORY_BIT = 1 << 31
"""Of a mode that SeaweedFS tells."""


class Chunks(Protocol):
    def names(self) -> set[str]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None: ...


class Files:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> set[str]:
        return {path.name for path in self._directory.glob("*.data")}

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        (self._directory / name).write_bytes(data)


class Redis:
    def __init__(self, port: int) -> None:
        self._port = port

    def names(self) -> set[str]:
        found = self.ask(b"KEYS", b"*")
        assert isinstance(found, list)
        return {name.decode("latin-1") for name in found}

    def read(self, name: str) -> bytes:
        found = self.ask(b"GET", name.encode("latin-1"))
        assert isinstance(found, bytes)
        return found

    def write(self, name: str, data: bytes) -> None:
        assert self.ask(b"SET", name.encode("latin-1"), data) == b"OK"

    def ask(self, *words: bytes) -> bytes | list[bytes]:
        """A command, over a connection of its own."""
        with socket.create_connection(("127.0.0.1", self._port), timeout=TIMEOUT_S) as redis:
            redis.sendall(_command(b"AUTH", PASSWORD.encode()) + _command(*words))
            with redis.makefile("rb") as stream:
                assert _answer(stream) == b"OK"
                return _answer(stream)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _answer(stream: BinaryIO) -> bytes | list[bytes]:
    line = stream.readline().rstrip()
    kind, rest = line[:1], line[1:]
    if kind == b"*":
        return [_bulk(stream) for _ in range(int(rest))]
    if kind == b"$":
        return stream.read(int(rest) + 2)[:-2]
    assert kind in b"+:", line
    return rest


def _bulk(stream: BinaryIO) -> bytes:
    found = _answer(stream)
    assert isinstance(found, bytes)
    return found


class Filer:
    """A bucket, below S3: SeaweedFS's filer, which asks for no signature."""

    def __init__(self, url: str) -> None:
        """url: of the bucket's directory."""
        self._root, _, self._bucket = url.partition("/buckets/")

    def names(self) -> set[str]:
        try:
            return set(self._under(f"/buckets/{self._bucket}"))
        except HTTPError as exc:
            with exc:
                if exc.code != HTTPStatus.NOT_FOUND:
                    raise
            return set()  # the bucket was emptied, and goes with its content

    def read(self, name: str) -> bytes:
        return self._ask("GET", name)

    def write(self, name: str, data: bytes) -> None:
        self._ask("PUT", name, data)

    def _under(self, directory: str) -> Iterator[str]:
        entries = json.loads(self._ask("GET", f"{directory}/", query="?limit=100000"))["Entries"] or ()
        for entry in entries:
            if entry["Mode"] & DIRECTORY_BIT:
                yield from self._under(entry["FullPath"])
            else:
                yield entry["FullPath"]

    def _ask(self, method: str, path: str, data: bytes | None = None, query: str = "") -> bytes:
        asked = urllib.request.Request(f"{self._root}{quote(path)}{query}", data, method=method)
        asked.add_header("Accept", "application/json")
        asked.add_header("Content-Type", "application/octet-stream")
        with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
            found: bytes = answer.read()
            return found
