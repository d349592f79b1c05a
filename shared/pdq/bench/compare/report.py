"""A comparison as text, and as one object for programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from pdq.bench.compare import loads
from pdq.bench.compare.pace import Pace
from pdq.bench.compare.rows import Row, Run, row
from pdq.bench.compare.run import Plan
from pdq.bench.compare.verdicts import BreakEven, Ratio, Winner, break_evens, ratios, winners
from pdq.bench.metrics import Slos, Spread

COLUMNS = (
    "", "ITL p50", "p99", "p99.9", "max", "stalls %", "gap p99", "TTFT p50", "p99", "long p50", "p99", "tokens/s",
    "good %", "failed", "KV loaded",
)  # fmt: skip
LEGEND = (
    "ms. ITL, gap (by its duration) and TTFT: of short chats; stalls: gaps over 5 times the median; long: TTFT of long "
    "prompts; good: of all requests"
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found. `machine`: where; `prefill_share`: prompt tokens for each token of an answer, by load."""

    machine: dict[str, Any]
    setups: dict[str, str]
    rounds: int
    seed: int
    sizes: loads.Sizes
    pace: Pace | None = None
    """What the rates in `sizes` come from; None where they were given."""
    prefill_share: dict[str, float]
    rows: list[Row]
    ratios: list[Ratio]
    winners: list[Winner]
    break_even: list[BreakEven]

    def lines(self) -> list[str]:
        """For people. Latencies are milliseconds."""
        return list(_lines(self))


def report(plan: Plan, runs: Sequence[Run], slos: Slos, machine: dict[str, Any], pace: Pace | None) -> Report:
    """Of what was measured, in the order of the set-ups."""
    rows = []
    for load in loads.TITLES:
        for setup in plan.setups:
            found = [run for run in runs if (run.setup, run.load) == (setup.name, load)]
            rows += [row(setup, load, found, slos)] if found else []
    split = [setup.name for setup in plan.setups if setup.disaggregated]
    share = {load: loads.prefill_share(plan.load(load, 0)) for load in loads.TITLES}
    return Report(
        machine=machine,
        setups={setup.name: setup.title for setup in plan.setups},
        rounds=plan.rounds,
        seed=plan.seed,
        sizes=plan.sizes,
        pace=pace,
        prefill_share={str(load): value for load, value in share.items()},
        rows=rows,
        ratios=ratios(rows),
        winners=winners(rows, split),
        break_even=break_evens(rows, split, share),
    )


def _lines(told: Report) -> Iterator[str]:
    yield from _section("set-ups", (f"{name:6} {title}" for name, title in told.setups.items()))
    yield LEGEND
    yield ""
    for load, title in loads.TITLES.items():
        if rows := [row for row in told.rows if row.load == load]:
            yield f"{load}: {title} ({told.prefill_share[load]:.1f} prompt tokens for each token of an answer)"
            yield from _table(rows)
            yield ""
    yield from _section(
        "ratios", (f"{each.value:8.2f}  {each.name} ({each.over}; {each.under})" for each in told.ratios)
    )
    yield from _section("best of each load, and the best of the other kind", map(_won, told.winners))
    yield from _section("break-even, in prompt tokens for each token of an answer", map(_even, told.break_even))
    if told.pace is not None:
        yield f"a plain engine on one half: {told.pace}"
    yield _told_of(told)


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    if found := list(lines):
        yield from (title, *(f"  {line}" for line in found), "")


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:8.2f}  {ratio.name} ({ratio.over}; {ratio.under})"


def _won(won: Winner) -> str:
    return f"{won.load:6} {won.measure:25} ({won.setup}) {won.value:,.1f}; ({won.runner_up}) {won.runner_up_value:,.1f}"


def _even(even: BreakEven) -> str:
    where = even.prompt_tokens_per_answer_token
    return f"{even.measure:25} {f'{where:.1f}, {even.text}' if where is not None else even.text}"


def _told_of(told: Report) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in told.machine.items())
    lasts = f"{told.rounds} rounds, {told.sizes.seconds:g} s of chats and of mixed, half of it of short"
    return f"{lasts}: {told.sizes}; {machine}"


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    told = [f"  ({row.setup}) does not count: {row.error}" for row in rows if row.error]
    return [f"  {line}" for line in lines] + told


def _cells(row: Row) -> tuple[str, ...]:
    kv = f"{row.kv.loaded_tokens}/{row.kv.promised_tokens}" if row.kv is not None else "-"
    good = f"{100 * row.good_fraction:.0f}" if row.good_fraction is not None else "-"
    return (
        f"{row.setup}{'!' if row.error else ''}",
        *_two(row.itl_ms),
        f"{row.itl_p999_ms:,.0f}" if row.itl_ms.count else "-",
        f"{row.itl_ms.max:,.0f}" if row.itl_ms.count else "-",
        f"{100 * row.stall_fraction:.1f}" if row.itl_ms.count else "-",
        _two(row.gap_ms)[1],
        *_two(row.ttft_ms),
        *_two(row.ttft_long_ms),
        f"{row.tokens_per_s:.1f}" if row.completed else "-",
        good,
        str(row.failed),
        kv,
    )


def _two(spread: Spread) -> tuple[str, str]:
    return (f"{spread.p50:,.0f}", f"{spread.p99:,.0f}") if spread.count else ("-", "-")
