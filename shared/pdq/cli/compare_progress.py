"""How a comparison that runs is shown on stderr: a bar on a terminal, else a line for each step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pdq.bench.compare.shown import Shown
from pdq.bench.records import Record
from pdq.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress


class Lines:
    """For logs and pipes."""

    def __init__(self) -> None:
        self._said = ""

    def doing(self, text: str) -> None:
        # What a start waits for changes often, and is no news.
        step, _, waits = text.partition(": starting")
        if not waits and step != self._said:
            output.note(step)
        self._said = step

    def ended(self, record: Record) -> None: ...

    def skipped(self, num_requests: int) -> None: ...

    def say(self, text: str) -> None:
        output.note(text)


class Bar:
    """Over all requests of all rounds."""

    def __init__(self, progress: Progress, num_requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=num_requests)

    def doing(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def ended(self, record: Record) -> None:
        self._progress.update(self._task, advance=1)

    def skipped(self, num_requests: int) -> None:
        self._progress.update(self._task, advance=num_requests)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def shown(num_requests: int) -> Iterator[Shown]:
    if not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Drawing takes its time, which answers that come meanwhile would be measured with.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        yield Bar(progress, num_requests)
