"""Where results go: a file that an earlier run may have begun, or stdout."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pdq.batch.lines import CHUNK_BYTES, Line, Splitter
from pdq.batch.records import PREFIX, Mark, Record
from pdq.errors import Rejected

MOST_RESULT_BYTES = 256 << 20
"""More than any answer has: a longer line is not of ours."""
_BEGINNING = f'{{"id":"{PREFIX}'.encode()
_encode = msgspec.json.Encoder().encode


class _Written(msgspec.Struct):
    """What is needed of a line that was written before."""

    id: str
    error: Any = None


class Results:
    """`write` takes whole lines. `marks`: of the lines of input that have results already."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._checks = array("I", bytes(4096))
        """By line number: 0, or the mark's check."""
        self.num_succeeded = 0
        self.num_failed = 0

    def check_of(self, number: int) -> int:
        """The check of a line that has its result, or 0."""
        return self._checks[number] if number < len(self._checks) else 0

    def add(self, record: Record) -> None:
        """Write a result. Raises what the writing raises."""
        self._write(_encode(record) + b"\n")
        self._count(record.error is None)

    def _count(self, succeeded: bool) -> None:
        if succeeded:
            self.num_succeeded += 1
        else:
            self.num_failed += 1

    def know(self, mark: Mark, succeeded: bool) -> None:
        """Take a result that was written before; the first one of a line counts."""
        if self.check_of(mark.number):
            return
        if mark.number >= len(self._checks):
            self._checks.frombytes(bytes(4 * max(mark.number + 1 - len(self._checks), len(self._checks))))
        self._checks[mark.number] = mark.check
        self._count(succeeded)


@contextlib.contextmanager
def in_file(path: Path, batch: str) -> Iterator[Results]:
    """Results in a file, added to those that it has of this batch; it is this run's alone meanwhile. A pipe or a device
    has none.

    A last line that was cut off by a crash is removed. Raises Rejected for a file with anything else in it, or one that
    another run writes to, and OSError.
    """
    with open(path, "a+b", buffering=0) as file:
        results = Results(lambda data: _write_all(file, data))
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            _lock(file, path)
            _read(file, path, batch, results)
        yield results


def _lock(file: BinaryIO | Any, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Rejected(f"another run writes to {path}", code="usage", param="output") from None
    except OSError:
        # A file system without locks.
        return


def _read(file: BinaryIO | Any, path: Path, batch: str, results: Results) -> None:
    splitter = Splitter(MOST_RESULT_BYTES)
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        for line in splitter.feed(chunk):
            _take(line, path, batch, results)
    num_torn = splitter.num_torn
    for torn in splitter.close():
        if torn.data[: len(_BEGINNING)] != _BEGINNING[: len(torn.data)]:
            raise _foreign(path, torn)
    if num_torn:
        file.truncate(file.seek(0, os.SEEK_END) - num_torn)


def _take(line: Line, path: Path, batch: str, results: Results) -> None:
    try:
        written = msgspec.json.decode(line.data, type=_Written)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise _foreign(path, line) from None
    mark = Mark.parse(written.id)
    if mark is None or mark.batch != batch:
        raise _foreign(path, line)
    results.know(mark, written.error is None)


def _foreign(path: Path, line: Line) -> Rejected:
    message = f"line {line.number} of {path} is no result of this batch (another input, --name or --model made it)"
    return Rejected(f"{message}: write to another file", code="usage", param="output")


def _write_all(file: BinaryIO | Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
