"""A batch: lines in, results out in the order in which they come, a bounded number of requests at one time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

from pdq.batch.asking import Asker
from pdq.batch.items import BadLine, Item, read_item
from pdq.batch.lines import Line, Splitter, lines, read_some
from pdq.batch.records import Mark, Record, failed
from pdq.batch.results import Results
from pdq.batch.seen import Seen
from pdq.errors import Rejected
from pdq.messages import ErrorInfo
from pdq.settings import Models

MOST_LINE_BYTES = 2 << 20
"""A line that is longer holds no body that a broker would take."""

OnResult = Callable[[Record], None]


class Input(NamedTuple):
    """A file that was looked at: SHA-256 of its content, hex, and how many of its lines are not blank."""

    digest: str
    num_lines: int


async def examine(fd: int) -> Input:
    """Read a whole file, and go back to its beginning. Raises Rejected (UTF-16) or OSError."""
    digest, number, splitter = hashlib.sha256(), 0, Splitter(MOST_LINE_BYTES)
    while chunk := await read_some(fd):
        digest.update(chunk)
        number += sum(1 for _ in splitter.feed(chunk))
    number += sum(1 for _ in splitter.close())
    os.lseek(fd, 0, os.SEEK_SET)
    return Input(digest.hexdigest(), number)


def batch_of(name: str, default_model: str) -> str:
    """16 hex digits that a batch is known by. `name`: its user's name for it, or the digest of its input."""
    return hashlib.sha256(f"pdq-batch {name} {default_model}".encode()).hexdigest()[:16]


class Batch:
    """`batch`: as of `batch_of`. `on_result` is called after each result that is written."""

    def __init__(
        self,
        batch: str,
        asker: Asker,
        results: Results,
        models: Models | None,
        default_model: str,
        concurrency: int,
        on_result: OnResult,
    ) -> None:
        self.num_lines = 0
        """Lines read so far that are not blank."""
        self._batch = batch
        self._asker = asker
        self._results = results
        self._models = models
        self._default_model = default_model
        self._slots = asyncio.Semaphore(concurrency)
        self._on_result = on_result
        self._seen = Seen()

    async def run(self, fd: int) -> None:
        """Give every line of a file its result. Raises Rejected (a file that cannot be this batch's input), OSError,
        and what the writing of results raises. What was submitted goes on, whatever ends this."""
        try:
            async with asyncio.TaskGroup() as group, contextlib.aclosing(lines(fd, MOST_LINE_BYTES)) as source:
                async for line in source:
                    self.num_lines += 1
                    if (item := self._to_ask(line)) is not None:
                        await self._slots.acquire()
                        group.create_task(self._ask(item))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def _to_ask(self, line: Line) -> Item | None:
        """The request of a line that has no result yet; one that asks for nothing has it now."""
        try:
            item = self._read(line)
        except BadLine as exc:
            mark = Mark.of(self._batch, line.number, hashlib.sha256(line.data).digest())
            if not self._has_result(mark):
                error = ErrorInfo(code=exc.code, message=str(exc), param=exc.param)
                self._add(failed(mark, exc.custom_id, error))
            return None
        return None if self._has_result(Mark.of(self._batch, line.number, item.digest)) else item

    def _read(self, line: Line) -> Item:
        item = read_item(line, self._models, self._default_model)
        if not self._seen.add(item.custom_id):
            why = Rejected("an earlier line has this custom_id", code="duplicate_id", param="custom_id")
            raise BadLine(why, item.custom_id)
        return item

    def _has_result(self, mark: Mark) -> bool:
        check = self._results.check_of(mark.number)
        if check and check != mark.check:
            message = f"line {mark.number} is not the one that the output has a result of: write to another file"
            raise Rejected(message, code="usage", param="FILE")
        return bool(check)

    async def _ask(self, item: Item) -> None:
        try:
            self._add(await self._asker.ask(item))
        finally:
            self._slots.release()

    def _add(self, record: Record) -> None:
        self._results.add(record)
        self._on_result(record)
