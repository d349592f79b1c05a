"""Lines of a file or a pipe, of any number and length, in bounded memory.

A line ends with a line feed, and the carriage return before it is no part of it; nothing else ends one. Lines are
numbered from 1. Blank lines have numbers, and are left out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from typing import NamedTuple

from pdq.errors import Rejected

CHUNK_BYTES = 1 << 16
BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Line(NamedTuple):
    """`data` has no line end. Of a line that is too long it is empty, and `num_bytes` tells its size."""

    number: int
    data: bytes
    num_bytes: int

    @property
    def too_long(self) -> bool:
        return self.num_bytes > len(self.data)


class Splitter:
    """Feed it chunks; it returns the lines that are whole. Of one that is longer than `most_bytes` it keeps nothing."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._rest = bytearray()
        self._num_bytes = 0
        """Of the line that is not whole yet."""
        self._number = 0
        self._first: bytes | None = b""
        """What came, until it is enough to tell the encoding."""

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Raises Rejected for a file in another encoding, which its first bytes tell."""
        if self._first is not None:
            self._first += chunk
            if len(self._first) < len(BOM):
                return
            chunk, self._first = _checked(self._first), None
        yield from self._split(chunk)

    def close(self) -> Iterator[Line]:
        """The last line, where the file does not end with a line end."""
        if self._first is not None:
            yield from self._split(_checked(self._first))
        if self._num_bytes:
            yield from self._whole()

    @property
    def num_torn(self) -> int:
        """Bytes after the last line end so far."""
        return self._num_bytes + len(self._first or b"")

    def _split(self, chunk: bytes) -> Iterator[Line]:
        begin = 0
        while (end := chunk.find(b"\n", begin)) >= 0:
            self._keep(chunk[begin:end])
            begin = end + 1
            yield from self._whole()
        self._keep(chunk[begin:])

    def _keep(self, part: bytes) -> None:
        self._num_bytes += len(part)
        if self._num_bytes <= self._most:
            self._rest += part
        else:
            self._rest.clear()

    def _whole(self) -> Iterator[Line]:
        self._number += 1
        long = self._num_bytes > self._most
        data = bytes(self._rest).removesuffix(b"\r")
        line = Line(self._number, data, self._num_bytes if long else len(data))
        self._rest.clear()
        self._num_bytes = 0
        if long or data.strip():
            yield line


def _checked(first: bytes) -> bytes:
    """A file's first bytes, without a byte order mark. Raises Rejected for UTF-16."""
    if first.startswith(UTF16) or first[1:2] == b"\0" or first[:1] == b"\0":
        raise Rejected("the file is UTF-16; expected UTF-8", code="invalid_text", param="FILE")
    return first.removeprefix(BOM)


async def lines(fd: int, most_bytes: int) -> AsyncGenerator[Line, None]:
    """The lines of an open file or pipe, as they come. Raises Rejected (UTF-16) or OSError."""
    splitter = Splitter(most_bytes)
    while chunk := await read_some(fd):
        for line in splitter.feed(chunk):
            yield line
    for line in splitter.close():
        yield line


async def read_some(fd: int) -> bytes:
    """What there is to read, as soon as there is any; nothing at the end.

    Not in a thread: one that waits at a pipe cannot be cancelled.
    """
    await _readable(fd)
    return os.read(fd, CHUNK_BYTES)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    try:
        loop.add_reader(fd, _set, ready)
    except PermissionError:
        # A file on a disk, which is always ready.
        await asyncio.sleep(0)
        return
    try:
        await ready
    finally:
        loop.remove_reader(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
