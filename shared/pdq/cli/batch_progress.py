"""How a batch that runs is shown on stderr: a bar on a terminal, and the first lines that failed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdq.batch.records import Record
from pdq.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress

MOST_TOLD = 10
"""Failed lines that are told of; all are in the output."""


class Told:
    """Tells of failed lines."""

    def __init__(self) -> None:
        self.num_failed = 0

    def result(self, record: Record) -> None:
        error = record.error
        if error is None:
            return
        self.num_failed += 1
        if self.num_failed <= MOST_TOLD:
            self.say(f"line {error.line}: {error.code}: {error.message}")
        if self.num_failed == MOST_TOLD:
            self.say("further lines that fail are only in the output")

    def say(self, text: str) -> None:
        output.note(text)


class Bar(Told):
    """Shows how far the batch is, too."""

    def __init__(self, progress: Progress, num_lines: int, earlier: int) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("0 failed", total=num_lines or None, completed=earlier)

    def result(self, record: Record) -> None:
        super().result(record)
        self._progress.update(self._task, advance=1, description=f"{self.num_failed} failed")

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def told(num_lines: int, earlier: int, *, bar: bool) -> Iterator[Told]:
    """num_lines: 0 where nobody knows. earlier: of those, how many have results already."""
    if not bar or not sys.stderr.isatty():
        yield Told()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bar(progress, num_lines, earlier)
