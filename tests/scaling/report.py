"""What came of a run, for people and for machines."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from pdq.messages import StageName

from tests.scaling.driver import Row

WIDTH = 30
"""Of the figure's bars, characters."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds after its submit; `submitted`: that of the broker's clock, Unix."""

    request: str
    burst: int
    submitted: float
    needs: dict[StageName, tuple[float, float]]
    """From when until when it needs a worker of a role, Unix."""
    first_token_s: float
    lasted_s: float
    given_back: int
    """How often a worker that was told to end gave it back."""
    outcome: str
    order: str
    """And the reason for it."""


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    lasted_s: float
    """From its first submit to its last end."""
    to_zero_s: float
    """From its last end until no worker is left."""
    first_token_s: float
    """The soonest of its requests had its first token so long after its submit: what a start costs."""
    cold_starts_s: dict[str, float]
    """By service: the longest in the traces of its first requests."""


class Report(msgspec.Struct, kw_only=True):
    plan_seed: int
    bursts: list[Burst] = []
    requests: list[Request] = []
    began: float = 0.0
    """Unix: what the rows' times count from."""
    rows: list[Row] = []
    changes: dict[StageName, list[int]] = {}
    """Replicas, a number for each change."""
    worker_s: dict[StageName, float] = {}
    """Seconds that workers were there, summed over them."""
    troubles: list[str] = []
    failures: list[str] = []
    """What is wrong with requests."""

    @property
    def ok(self) -> bool:
        return not self.troubles and not self.failures

    @property
    def given_back(self) -> int:
        return sum(one.given_back for one in self.requests)

    def lines(self) -> list[str]:
        return [*self.table(), "", *self.figure(), "", *self._summary()]

    def table(self) -> list[str]:
        """The looks at which something changed."""
        lines = ["     s  role      lag  replicas  processes"]
        newest: dict[StageName, tuple[float | None, int, int]] = {}
        for row in self.rows:
            seen = (row.lag, row.replicas, row.processes)
            if newest.get(row.role, (0, 0, 0)) != seen:
                lag = "none" if row.lag is None else f"{row.lag:g}"
                lines.append(f"{row.at_s:6.1f}  {row.role:8} {lag:>4} {row.replicas:9} {row.processes:10}")
            newest[row.role] = seen
        return lines

    def figure(self) -> list[str]:
        """A line a second: lag as a bar, processes as dots."""
        roles = list(self.changes)
        most = max((row.lag or 0 for row in self.rows), default=0) or 1
        lines = ["     s  " + "  ".join(f"{role + ' lag':{WIDTH}} workers" for role in roles)]
        for second, looks in _by_second(self.rows):
            cells = []
            for role in roles:
                mine = [row for row in looks if row.role == role]
                lag = max((row.lag or 0 for row in mine), default=0)
                bar = "█" * max(round(WIDTH * lag / most), int(lag > 0))
                cells.append(f"{bar:{WIDTH}} {'●' * max((row.processes for row in mine), default=0):7}")
            lines.append(f"{second:6}  " + "  ".join(cells).rstrip())
        return lines

    def _summary(self) -> Iterator[str]:
        for number, burst in enumerate(self.bursts):
            mine = [one for one in self.requests if one.burst == number]
            firsts = [one.first_token_s for one in mine]
            cold = ", ".join(f"{service} {seconds:g} s" for service, seconds in burst.cold_starts_s.items())
            yield (
                f"burst {number}: {burst.requests} requests, {sum(one.outcome == 'finished' for one in mine)} finished "
                f"in {burst.lasted_s:g} s; first token after {min(firsts):g} to {max(firsts):g} s "
                f"(median {statistics.median(firsts):.2f}); all workers gone {burst.to_zero_s:g} s after the last end"
            )
            yield f"  cold starts in the traces of its first requests: {cold or 'none'}"
        for role, numbers in self.changes.items():
            took = f"{self.worker_s.get(role, 0.0):g} worker seconds of {self.rows[-1].at_s if self.rows else 0:g} s"
            yield f"{role}: replicas {' '.join(map(str, numbers))}; {took}"
        orders = Counter(one.order for one in self.requests)
        yield f"orders: {', '.join(f'{count} {order}' for order, count in orders.most_common())}"
        yield f"given back by workers that were told to end: {self.given_back}"
        yield from (f"trouble: {trouble}" for trouble in self.troubles)
        yield from self.failures
        yield "ok" if self.ok else f"FAILED: {len(self.failures)} failures, {len(self.troubles)} troubles"


def _by_second(rows: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    looks: dict[int, list[Row]] = {}
    for row in rows:
        looks.setdefault(int(row.at_s), []).append(row)
    return iter(sorted(looks.items()))
