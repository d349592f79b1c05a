"""The sections of docs/benchmarks.md: each is one benchmark, with the command that measures it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from pdq.bench.compare import report as compare

from tests.bench import cold_start, kv_report, replay_report, report, scale_report, streams, tokens, up

MINUTE = 60.0


class Replays(msgspec.Struct, frozen=True):
    """What `tests.bench.replay` prints."""

    replays: list[replay_report.Replay]


class Section(NamedTuple):
    """command: what `python -m` runs; it prints one JSON value. figures: the type of that. most_s: its bound.
    takes: arguments that only the machine knows; needs_it: without them it is left out."""

    name: str
    title: str
    command: str
    figures: Any
    most_s: float
    takes: Literal["", "traces", "against"] = ""
    needs_it: bool = False

    @property
    def shown(self) -> str:
        """The command as it is typed."""
        return self.command if self.command.startswith("pdq ") else f"python -m {self.command}"

    def asked(self, more: Sequence[str]) -> Section:
        """The same with more options."""
        return self._replace(command=" ".join([self.command, shlex.join(more)])) if more else self


SECTIONS = {
    section.name: section
    for section in (
        Section("compare", "Does it pay?", "pdq bench compare --json", compare.Report, 180 * MINUTE),
        Section("control", "The control path over its floor", "tests.bench.control --json", report.Report, 30 * MINUTE),
        Section("scale", "Ten to a thousand workers", "tests.bench.scale --json", scale_report.Report, 45 * MINUTE),
        Section(
            "tokens", "Tokens through the log", "tests.bench.tokens --tokens 16000 --json", tokens.Report, 15 * MINUTE
        ),
        Section("streams", "A thousand streams", "tests.bench.streams --json", streams.Report, 15 * MINUTE),
        Section("kv", "What moving KV costs", "tests.bench.kv --json", kv_report.Report, 120 * MINUTE),
        Section(
            "cold_start", "From nothing to a worker", "tests.bench.cold_start --json", cold_start.Report, 30 * MINUTE
        ),
        Section("up", "From `pdq up` to ready", "tests.bench.up --json", up.Report, 60 * MINUTE, takes="against"),
        Section(
            "replay",
            "Traces, replayed",
            "tests.bench.replay --json",
            Replays,
            150 * MINUTE,
            takes="traces",
            needs_it=True,
        ),
    )
}
