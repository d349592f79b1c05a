"""What came of a run of `tests.bench.scale`, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.bench.load import Answer
from tests.bench.output import listed
from tests.bench.saturation import Saturation
from tests.bench.stats import Spread, percentile, spread

FLAT = 1.2
"""By how much the dearest number of workers may cost more per request than the cheapest."""


class Round(msgspec.Struct, frozen=True):
    """One path's share of a round. cpu_s: what the load added, by group of processes."""

    answers: list[Answer]
    cpu_s: dict[str, float]

    @property
    def cpu_ms(self) -> dict[str, float]:
        """Of a request."""
        return {name: cpu_s * 1e3 / len(self.answers) for name, cpu_s in self.cpu_s.items()}


class Figures(msgspec.Struct, frozen=True):
    """One path at one number of workers. Milliseconds; added: less what the engine takes alone.

    cpu_ms: of a request, by group of processes, medians of the rounds; total_ms: all of them, over the rounds.
    """

    requests: int
    added_first_p50: float
    added_first_p99: float
    added_end_p50: float
    added_end_p99: float
    cpu_ms: dict[str, float]
    total_ms: Spread


class Size(msgspec.Struct, frozen=True):
    """Both paths at one number of workers. idle_cores: what pdq takes with nothing to do, by group of processes."""

    workers: int
    idle_cores: dict[str, float]
    floor: Figures
    pdq: Figures
    floor_saturation: Saturation
    pdq_saturation: Saturation


class Report(msgspec.Struct, frozen=True, kw_only=True):
    load_before: float
    """One-minute load average before the run."""
    load_after: float
    cores: int
    profile: str
    alone_first_ms: float
    """The engine alone, to the first token and to the end: not in what is added."""
    alone_end_ms: float
    rate: float
    """Requests a second of the rounds."""
    seconds: float
    rounds: int
    trace_sample: float
    bound_ms: float
    """A rate is sustained while the p99 of the added latency to the end stays within it, and no request fails."""
    trial_s: float
    sizes: list[Size]
    growth: float
    """CPU per request at the dearest number of workers, over the cheapest."""
    floor_growth: float
    """The same of the floor, which has no more processes then, but the same broker."""
    flat: bool

    def lines(self) -> list[str]:
        """The summary as text."""
        lines = [
            f"load average {self.load_before:.1f} before, {self.load_after:.1f} after, on {self.cores} cores",
            f"{self.rate:g} requests/s for {self.seconds:g} s, {self.rounds} rounds; engine {self.profile}, alone "
            f"{self.alone_first_ms:.1f} ms to the first token, {self.alone_end_ms:.1f} ms to the end; "
            f"spans of {self.trace_sample:.0%} of the traces",
        ]
        for size in self.sizes:
            lines += ["", f"{size.workers} workers; idle: {listed(size.idle_cores, 'cores')}"]
            lines += [_line("floor", size.floor), _line("pdq", size.pdq)]
            lines += [
                self._sustained(name, saturation)
                for name, saturation in (("floor", size.floor_saturation), ("pdq", size.pdq_saturation))
                if saturation.trials
            ]
        told = " to ".join(str(size.workers) for size in (self.sizes[0], self.sizes[-1]))
        verdict = (
            f"within {FLAT - 1:.0%}: {'yes' if self.flat else 'NO'} ({self.growth:.2f}; floor {self.floor_growth:.2f})"
        )
        return [*lines, "", f"CPU per request flat from {told} workers {verdict}"]

    def _sustained(self, name: str, saturation: Saturation) -> str:
        rates = f"  {name:<6}sustains {saturation.sustained:.0f} requests/s for {self.trial_s:g} s"
        return f"{rates} within {self.bound_ms:.0f} ms (p99, added); limit: {saturation.limit}"


def figures(rounds: Sequence[Round], alone: Answer) -> Figures:
    """alone: what the engine takes, seconds; of the floor's rounds 0."""
    firsts = [(answer.first_s - alone.first_s) * 1e3 for each in rounds for answer in each.answers]
    ends = [(answer.end_s - alone.end_s) * 1e3 for each in rounds for answer in each.answers]
    costs = [each.cpu_ms for each in rounds]
    return Figures(
        len(ends),
        percentile(firsts, 0.5),
        percentile(firsts, 0.99),
        percentile(ends, 0.5),
        percentile(ends, 0.99),
        {name: percentile([cost[name] for cost in costs], 0.5) for name in costs[0]},
        spread([sum(cost.values()) for cost in costs]),
    )


def growth(sizes: Sequence[Figures]) -> float:
    """Of one path; see `Report`."""
    totals = [size.total_ms.median for size in sizes]
    return max(totals) / min(totals)


def _line(name: str, found: Figures) -> str:
    total = found.total_ms
    return (
        f"  {name:<6}added to the first token {found.added_first_p50:.1f} / {found.added_first_p99:.1f}, "
        f"to the end {found.added_end_p50:.1f} / {found.added_end_p99:.1f} ms (p50 / p99); CPU a request "
        f"{total.median:.2f} ms ({total.min:.2f} … {total.max:.2f}): {listed(found.cpu_ms, 'ms')}"
    )
