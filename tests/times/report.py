"""What was measured: a row per time, for people and for machines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

HEADINGS = ("time from ... to ...", "place", "n", "median", "worst", "to compare with")

NOTES = (
    "end: the request's terminal event at its live reader",
    "engine idle: nothing runs, waits or holds KV in it, by the gauges of its worker, which asks it every 2 ms here;",
    "  sim leaves a step in the middle, vLLM finishes the one that runs",
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One time, measured again and again. `what`: from what to what; `place`: where the request was."""

    what: str
    place: str
    values_s: list[float]
    note: str = ""
    """What bounds it, or what to know of it."""
    ack_wait_s: float | None = None
    """Where a time follows from the ack wait: that, to compare with."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.values_s)

    @property
    def worst_s(self) -> float:
        return max(self.values_s)

    def cells(self) -> tuple[str, ...]:
        note = self.note
        if self.ack_wait_s is not None:
            ratios = [seconds / self.ack_wait_s for seconds in (self.median_s, self.worst_s)]
            note = f"{ratios[0]:.2f} and {ratios[1]:.2f} × the ack wait of {self.ack_wait_s:g} s; {note}".rstrip("; ")
        return self.what, self.place, str(len(self.values_s)), shown(self.median_s), shown(self.worst_s), note


class Report(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    load_before: float
    """One-minute load average before the run."""
    load_after: float
    cores: int
    rows: list[Row]

    def lines(self) -> list[str]:
        """The table as text."""
        loads = f"load average {self.load_before:.2f} before, {self.load_after:.2f} after, on {self.cores} cores"
        table = _table([HEADINGS, *(row.cells() for row in self.rows)])
        return [f"engine {self.engine}; {loads}", "", *table, "", *NOTES]


Tell = Callable[[Row], None]
"""Told of each row as it is measured."""
Tick = Callable[[str], None]
"""Told what is being measured, once for each time."""


def shown(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.rjust(width) if 2 <= place <= 4 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
