"""What came of a run, for people and for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from pdq.messages import Event

from tests.chaos.report import shown_before
from tests.resume.asking import Asked


class Failure(msgspec.Struct, frozen=True):
    key: str
    violations: list[str]
    connections: list[str]

    def lines(self) -> list[str]:
        return ["", f"{self.key}:", *(f"  {line}" for line in self.violations + self.connections)]


class Report(msgspec.Struct, kw_only=True):
    seed: int
    requests: int = 0
    """Those that were to be resumed."""
    left: int = 0
    """Those whose clients left for good."""
    duration_s: float = 0.0
    killed: dict[str, int] = {}
    """By part."""
    met: dict[str, int] = {}
    """Requests by what they met, each at least once."""
    connections: dict[str, int] = {}
    """By how they were opened, and how they ended; those that gave nothing apart."""
    events: int = 0
    troubles: list[str] = []
    failures: list[Failure] = []

    @property
    def ok(self) -> bool:
        return not self.troubles and not self.failures

    def count(self, asked: Asked, logs: Sequence[Sequence[Event]], found: list[str]) -> None:
        """Take in one request. logs: of its choices. found: what is wrong with it."""
        legs = asked.legs
        self.events += len(asked.frames)
        if asked.ask.leaves is not None:
            self.left += 1
        else:
            self.requests += 1
            self._meet(asked, logs)
        connections = Counter(self.connections)
        for number, leg in enumerate(legs):
            if leg.events:
                connections[f"{leg.how} {'again' if number else 'first'}"] += 1
                connections[leg.outcome] += 1
            else:
                connections["in vain"] += 1
        self.connections = dict(connections)
        if found:
            told = [f"{leg.how} at {leg.gateway}: {leg.events} events, {leg.outcome}" for leg in legs]
            self.failures.append(Failure(asked.ask.key, found, told))

    def _meet(self, asked: Asked, logs: Sequence[Sequence[Event]]) -> None:
        met = {
            "cut by the client": asked.count("cut") > 0,
            "cut by its gateway's death": asked.count("broken") > 0,
            "decode killed in mid-answer": any(map(shown_before, logs)),
        }
        met["all of these"] = all(met.values())
        met["resumed elsewhere"] = any(
            before.gateway != after.gateway and after.events for before, after in pairwise(asked.legs)
        )
        counts = Counter(self.met)
        counts.update({name: int(value) for name, value in met.items()})
        self.met = dict(counts)

    def lines(self) -> list[str]:
        """The summary as text."""
        lines = [
            f"seed {self.seed}: {self.requests} streams resumed, {self.left} left, in {self.duration_s:.0f} s",
            f"killed: {_counts(self.killed)}",
            f"streams: {_counts(self.met)}",
            f"connections: {_counts(self.connections)}; {self.events} events",
        ]
        lines += [f"trouble: {trouble}" for trouble in self.troubles]
        lines += [line for failure in self.failures for line in failure.lines()]
        verdict = "ok" if self.ok else f"FAILED: {len(self.failures)} requests, {len(self.troubles)} troubles"
        return [*lines, verdict]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
