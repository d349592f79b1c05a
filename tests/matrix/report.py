"""A run's tables, as Markdown for docs/evidence.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tests.matrix.orders import Cell
from tests.matrix.trial import Result


class Report(msgspec.Struct, kw_only=True):
    commit: str
    date: str
    seconds: float = 0.0
    cells: list[Cell] = []
    faults: list[Result] = []

    @property
    def wrong(self) -> list[str]:
        """Everything that is not as it must be."""
        cells = [f"{cell.mode}, {cell.order}: {each}" for cell in self.cells for each in cell.wrong]
        faults = [f"{each.mode}, {each.fault}, {each.when}: {line}" for each in self.faults for line in each.wrong]
        return cells + faults


def markdown(report: Report) -> str:
    heading = f"`make verify-all`, commit {report.commit}, {report.date}, {report.seconds / 60:.0f} min"
    parts = [heading, *_table(_orders(report)), "", *_table(_faults(report))]
    return "\n".join([*parts, *(["", "Wrong:", *report.wrong] if report.wrong else [])])


def _orders(report: Report) -> Iterator[Sequence[object]]:
    yield "mode", "order", "prompts equal", "KV promised", "loaded", "load ms p50", "faults passed", "worst wait s"
    for cell in report.cells:
        faults = [each for each in report.faults if each.mode == cell.mode]
        passed = f"{sum(not each.wrong for each in faults)} of {len(faults)}"
        mine = faults and cell.order == "prefill-first"
        yield (
            *(cell.mode, cell.order, f"{cell.equal} of {cell.prompts}", cell.promised, cell.loaded),
            "" if cell.load_ms is None else f"{cell.load_ms:.0f}",
            passed if mine else "",
            f"{max(each.wait_s for each in faults):.1f}" if mine else "",
        )


def _faults(report: Report) -> Iterator[Sequence[object]]:
    yield (
        "mode",
        "fault",
        "when",
        "answer",
        "KV loaded",
        "first token s",
        "longest gap beside it s",
        "counted",
        "KV again after s",
    )
    for each in report.faults:
        counted = ", ".join(f"{name} {value:g}" for name, value in each.counted.items())
        yield (
            *(each.mode, each.fault, each.when, "equal" if each.equal else "WRONG"),
            f"{each.loaded} of {each.promised}{each.cause and f' ({each.cause})'}",
            *(f"{each.wait_s:.1f}", f"{each.gap_s:.1f}", counted, f"{each.again_s:.1f}"),
        )


def _table(rows: Iterator[Sequence[object]]) -> Iterator[str]:
    head = next(rows)
    yield _row(head)
    yield "|" + "---|" * len(head)
    yield from map(_row, rows)


def _row(values: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, values))} |"
