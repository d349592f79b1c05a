"""What the rows amount to: ratios, who wins which load, and where that changes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pdq.bench.compare import loads
from pdq.bench.compare.rows import Row

ALIKE = 1.05
"""Two figures that differ by less are taken for equal: so much they differ from run to run."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One set-up's figure by another's."""

    name: str
    value: float
    over: str
    """Set-up and load of the figure above the line, with its value."""
    under: str


class Winner(msgspec.Struct, frozen=True, kw_only=True):
    """Who is best under a load, by one measure; and the best of the other kind."""

    load: loads.Name
    measure: str
    setup: str
    value: float
    runner_up: str
    """The best of those that disaggregate, where the winner does not; else the best of the others."""
    runner_up_value: float


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Where disaggregating begins to pay, by one measure."""

    measure: str
    prompt_tokens_per_answer_token: float | None
    """Interpolated between the two loads where the winner changes; None: it does not change."""
    text: str


class Point(NamedTuple):
    """How many times as good disaggregation is under a load. `share`: prompt tokens for each token of an answer."""

    share: float
    times: float
    load: loads.Name


class Measure(NamedTuple):
    """A figure to compare set-ups by. `low`: less is better."""

    name: str
    unit: str
    low: bool
    of: Callable[[Row], float]


MEASURES = (
    Measure("p99 ITL", "ms", True, lambda row: row.itl_ms.p99),
    Measure("p99 gap", "ms", True, lambda row: row.gap_ms.p99),
    Measure("p50 TTFT of chats", "ms", True, lambda row: row.ttft_ms.p50),
    Measure("p99 TTFT of chats", "ms", True, lambda row: row.ttft_ms.p99),
    Measure("p50 TTFT of long prompts", "ms", True, lambda row: row.ttft_long_ms.p50),
    Measure("tokens/s", "", False, lambda row: row.tokens_per_s),
)
ITL, GAP = MEASURES[:2]
"""Of chats. A gap counts for as long as it lasts: a stall that is less than one gap in a hundred is not in the p99 of
the ITL, whatever it takes."""
ENDS = (ITL, GAP, MEASURES[3], MEASURES[-1])
"""By which a break-even is looked for."""

Share = Mapping[loads.Name, float]
"""Prompt tokens for each token of an answer, by load."""


def best_budget(rows: Iterable[Row], measure: Measure) -> Row | None:
    """Of the plain engine's, under the mixed load."""
    plain = (row for row in rows if row.counts and row.load == "mixed" and row.setup.partition("-")[0] == "a")
    return min(plain, key=measure.of, default=None)


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Those that the comparison is for, as far as what they need was measured."""
    by = {(row.setup, row.load): row for row in rows if row.counts}
    mixed = by.get(("d", "mixed"))
    wanted = []
    for measure in (ITL, GAP):
        best = best_budget(rows, measure)
        wanted += [
            (f"chats' {measure.name}, mixed: (a) default by (d)", measure, by.get(("a", "mixed")), mixed),
            (f"chats' {measure.name}, mixed: (a) best budget by (d)", measure, best, mixed),
        ]
    for name in dict.fromkeys(row.setup for row in rows):
        told = f"chats' {ITL.name} of ({name}): mixed by chats alone"
        wanted.append((told, ITL, by.get((name, "mixed")), by.get((name, "chats"))))
    return [_ratio(told, by, over, under) for told, by, over, under in wanted if over and under and by.of(under)]


def _ratio(name: str, measure: Measure, over: Row, under: Row) -> Ratio:
    told = [f"{row.setup} {row.load}: {measure.of(row):.1f} ms" for row in (over, under)]
    return Ratio(name=name, value=measure.of(over) / measure.of(under), over=told[0], under=told[1])


def winners(rows: Sequence[Row], disaggregated: Iterable[str]) -> list[Winner]:
    """By each load and measure. `disaggregated`: names of those set-ups; each kind must have been measured."""
    split = set(disaggregated)
    found = []
    for load in loads.TITLES:
        for measure in MEASURES:
            best = [_best(rows, load, measure, split, wanted) for wanted in (True, False)]
            if best[0] is not None and best[1] is not None:
                found.append(_winner(load, measure, best[0], best[1]))
    return found


def _best(rows: Iterable[Row], load: loads.Name, measure: Measure, split: set[str], wanted: bool) -> Row | None:
    """Of those that disaggregate, or of those that do not."""
    able = [row for row in rows if row.counts and row.load == load and measure.of(row)]
    kind = [row for row in able if (row.setup in split) == wanted]
    return min(kind, key=lambda row: measure.of(row) if measure.low else -measure.of(row), default=None)


def _winner(load: loads.Name, measure: Measure, split: Row, other: Row) -> Winner:
    pays = advantage(measure, split, other) > 1
    first, second = (split, other) if pays else (other, split)
    return Winner(
        load=load,
        measure=measure.name,
        setup=first.setup,
        value=measure.of(first),
        runner_up=second.setup,
        runner_up_value=measure.of(second),
    )


def advantage(measure: Measure, split: Row, other: Row) -> float:
    """How many times as good the first is; above 1 it is better."""
    ratio = measure.of(other) / measure.of(split)
    return ratio if measure.low else 1 / ratio


def break_evens(rows: Sequence[Row], disaggregated: Iterable[str], share: Share) -> list[BreakEven]:
    """By each measure of `ENDS`, over the share of prefill in a load."""
    split = set(disaggregated)
    found = []
    for measure in ENDS:
        points = []
        for load, at in sorted(share.items(), key=lambda pair: pair[1]):
            best = [_best(rows, load, measure, split, wanted) for wanted in (True, False)]
            if best[0] is not None and best[1] is not None:
                points.append(Point(at, advantage(measure, best[0], best[1]), load))
        found.append(break_even(measure.name, points))
    return found


def break_even(measure: str, points: Sequence[Point]) -> BreakEven:
    """`points`: in the order of their share of prefill. Between two loads the logarithms are taken for linear."""
    told = ", ".join(f"{point.load} {point.times:.2f} times" for point in points)
    clear = [point for point in points if not 1 / ALIKE < point.times < ALIKE]
    for before, after in itertools.pairwise(clear):
        if (before.times > 1) != (after.times > 1):
            where = _crossing(before, after)
            text = f"between {before.load} and {after.load} ({told})"
            return BreakEven(measure=measure, prompt_tokens_per_answer_token=where, text=text)
    if len(points) < 2:
        text = "not measured: it takes both kinds of set-up under two loads"
    elif not clear:
        text = f"none: both kinds are alike under every load ({told})"
    else:
        text = f"none: where they differ, disaggregation {'pays' if clear[0].times > 1 else 'does not pay'} ({told})"
    return BreakEven(measure=measure, prompt_tokens_per_answer_token=None, text=text)


def _crossing(before: Point, after: Point) -> float:
    part = math.log(before.times) / (math.log(before.times) - math.log(after.times))
    return math.exp(math.log(before.share) + part * (math.log(after.share) - math.log(before.share)))
