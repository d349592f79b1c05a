"""The sections of docs/benchmarks.md: each is one benchmark, with the command that measures it."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdq.bench.compare import report as compare

from tests.bench import cold_start, kv_report, report, scale_report, streams, tokens

MINUTE = 60.0


class Section(NamedTuple):
    """command: what `python -m` runs; it prints one JSON value. figures: the type of that. most_s: its bound.
    replays: it takes traces."""

    name: str
    title: str
    command: str
    figures: Any
    most_s: float
    replays: bool = False

    @property
    def shown(self) -> str:
        """The command as it is typed."""
        return self.command if self.command.startswith("pdq ") else f"python -m {self.command}"


SECTIONS = {
    section.name: section
    for section in (
        Section("compare", "Does it pay?", "pdq bench compare --json", compare.Report, 180 * MINUTE),
        Section("control", "The control path over its floor", "tests.bench.control --json", report.Report, 30 * MINUTE),
        Section("scale", "Ten to a thousand workers", "tests.bench.scale --json", scale_report.Report, 45 * MINUTE),
        Section("tokens", "Tokens through the log", "tests.bench.tokens --json", tokens.Report, 15 * MINUTE),
        Section("streams", "A thousand streams", "tests.bench.streams --json", streams.Report, 15 * MINUTE),
        Section("kv", "What moving KV costs", "tests.bench.kv --json", kv_report.Report, 120 * MINUTE),
        Section(
            "cold_start", "From nothing to a worker", "tests.bench.cold_start --json", cold_start.Report, 30 * MINUTE
        ),
        Section("up", "From `pdq up` to ready", "tests.bench.up --json", Any, 60 * MINUTE),
        Section("replay", "Traces, replayed", "tests.bench.replay --json", Any, 150 * MINUTE, replays=True),
    )
}
