"""What came of a soak, for people and for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tests.soak.growth import Growth, growth
from tests.soak.samples import QUANTITIES, Sample

MOST_PER_10_MIN = 1.0
"""MB of memory, open files, or threads that a process may gain."""
MOST_SHOWN = 20


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process over the measured time. `cpu`: cores it used on average."""

    name: str
    cpu: float
    grown: dict[str, Growth]
    """By quantity (see `samples`)."""


class Report(msgspec.Struct, kw_only=True):
    seed: int
    minutes: float
    warm_up_minutes: float
    rate: float
    """Good requests a second."""
    capacity: dict[str, float]
    """Requests of this mix that each stage could take a second."""
    outcomes: dict[str, int] = {}
    bad: dict[str, int] = {}
    """Requests that had to fail, by kind."""
    dead_letters: int = 0
    busy: dict[str, float] = {}
    """Share of a stage's slots that were in use, on average."""
    processes: list[Process] = []
    growing: list[str] = []
    wrong: list[str] = []
    """Requests that did not end as they must; the first few with their logs."""
    num_wrong: int = 0
    unsettled: list[str] = []
    """What was not zero, or not empty, in the end."""

    @property
    def ok(self) -> bool:
        return not (self.growing or self.num_wrong or self.unsettled)

    def note_wrong(self, request: str, found: Sequence[str], log: Sequence[str] = ()) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MOST_SHOWN:
            self.wrong.append("\n  ".join((request, *found, *log)))

    def measure(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Fill in the processes, and which of them grow. `samples`: those under load, after the warm-up."""
        for name, taken in samples.items():
            span_s = taken[-1].at_s - taken[0].at_s
            grown = {what: growth([(one.at_s, getattr(one, what)) for one in taken]) for what in QUANTITIES}
            cpu = (taken[-1].cpu_s - taken[0].cpu_s) / span_s
            self.processes.append(Process(name=name, cpu=round(cpu, 3), grown=grown))
            self.growing += [
                f"{name}: {what} grows by {found.per_10_min:.2f} in 10 minutes ({found.first:g} to {found.last:g})"
                for what, found in grown.items()
                if found.per_10_min >= MOST_PER_10_MIN
            ]

    def lines(self) -> list[str]:
        """The summary as text."""
        possible = ", ".join(f"{stage} {rate:.2f}" for stage, rate in self.capacity.items())
        busy = ", ".join(f"{stage} {share:.0%}" for stage, share in self.busy.items())
        lines = [
            f"seed {self.seed}: {self.minutes:g} minutes, the first {self.warm_up_minutes:g} not measured",
            f"load: {self.rate:.2f} requests/s of the {possible} that the stages could take; slots in use: {busy}",
            f"requests: {_counts(self.outcomes)}; had to fail: {_counts(self.bad)}; {self.dead_letters} dead letters",
            *self._table(),
        ]
        lines += [f"growing: {found}" for found in self.growing]
        lines += [f"not at rest: {found}" for found in self.unsettled]
        lines += [f"wrong: {found}" for found in self.wrong]
        told = f"FAILED: {len(self.growing)} grow, {len(self.unsettled)} not at rest, {self.num_wrong} requests wrong"
        return [*lines, "ok" if self.ok else told]

    def _table(self) -> list[str]:
        lines = [f"{'process':<12} {'cpu':>6} {'MB':>16} {'MB/10 min':>14} {'files':>9} {'threads':>9}"]
        for process in self.processes:
            rss, fds, threads = (process.grown[what] for what in QUANTITIES)
            memory = f"{rss.first:.1f} to {rss.last:.1f}"
            counts = f"{_from_to(fds):>9} {_from_to(threads):>9}"
            slope = f"{rss.per_10_min:+.2f} ± {rss.error:.2f}"
            lines.append(f"{process.name:<12} {process.cpu:>6.3f} {memory:>16} {slope:>14} {counts}")
        return lines


def _from_to(found: Growth) -> str:
    return f"{found.first:g} to {found.last:g}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
