"""How a load that runs is shown on stderr: a bar on a terminal, and the first request of each kind that failed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdq.bench.records import INTERRUPTED, Record
from pdq.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress


class Shown:
    """Tells of the first failure with each code."""

    def __init__(self) -> None:
        self._told = {"", INTERRUPTED}
        self.num_failed = 0

    def ended(self, record: Record) -> None:
        self.num_failed += bool(record.error)
        if record.error not in self._told:
            self._told.add(record.error)
            self.say(f"{record.error}: {record.message} (the first of its kind)")

    def say(self, text: str) -> None:
        output.note(text)


class Bar(Shown):
    """Shows how far the load is, too."""

    def __init__(self, progress: Progress, num_requests: int) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("0 failed", total=num_requests)

    def ended(self, record: Record) -> None:
        super().ended(record)
        self._progress.update(self._task, advance=1, description=f"{self.num_failed} failed")

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def shown(num_requests: int, *, bar: bool) -> Iterator[Shown]:
    if not bar or not sys.stderr.isatty():
        yield Shown()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    # Drawing takes its time, which answers that come meanwhile would be measured with.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        yield Bar(progress, num_requests)
