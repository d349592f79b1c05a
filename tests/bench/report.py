"""What came of a run, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from tests.bench.shape import Shape
from tests.bench.stats import Spread, percentile, ratios

PROCESSES = ("router", "prefill", "decode", "nats-server", "client")
TOTAL, LESS_ENGINE = "total", "total, less the engine"


class Round(msgspec.Struct, frozen=True):
    """One path's share of a round: seconds of each request, and CPU seconds by process for all of them."""

    first_s: list[float]
    end_s: list[float]
    batches: int
    cpu_s: dict[str, float]

    def cpu_ms(self, process: str) -> float:
        """Milliseconds per request; `total` is the sum over all processes."""
        spent = sum(self.cpu_s.values()) if process == TOTAL else self.cpu_s[process]
        return spent * 1e3 / len(self.end_s)


class Row(msgspec.Struct, frozen=True):
    """One figure of both paths in milliseconds, and the ratio of the rounds with its spread."""

    name: str
    floor_ms: float
    pdq_ms: float
    ratio: Spread | None


class Concurrency(msgspec.Struct, frozen=True):
    """All rows of one number of requests at a time. `batches`: token messages per request of pdq's path."""

    at_once: int
    requests: int
    latency: list[Row]
    cpu: list[Row]
    batches: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    load_before: float
    """One-minute load average before the run."""
    load_after: float
    cores: int
    rounds: int
    trace_sample: float
    shape: Shape
    engine_cpu_ms: dict[str, float]
    """The sim engine alone, CPU milliseconds per request by stage: in pdq's figures, not in the floor's."""
    results: list[Concurrency]

    def lines(self) -> list[str]:
        """The summary as text."""
        shape, engine = self.shape, self.engine_cpu_ms
        lines = [
            f"load average {self.load_before:.2f} before, {self.load_after:.2f} after, on {self.cores} cores",
            f"{self.rounds} rounds; a request: submit {shape.submit} B, jobs {shape.prefill_job} and "
            f"{shape.decode_job} B, {len(shape.states)} states {sum(shape.states)} B, "
            f"{len(shape.outs)} token batches {sum(shape.outs)} B; spans of {self.trace_sample:.0%} of the traces",
            f"in pdq's CPU, the sim engine alone: prefill {engine['prefill']:.2f} ms, decode {engine['decode']:.2f} ms",
        ]
        for result in self.results:
            lines += ["", *_table(result)]
        return lines


def summarise(at_once: int, floor: Sequence[Round], pdq: Sequence[Round], engine_ms: float) -> Concurrency:
    """Rounds of both paths, in pairs, at one concurrency. engine_ms: CPU of a request in pdq's engines."""
    requests = sum(len(each.end_s) for each in pdq)
    return Concurrency(
        at_once=at_once,
        requests=requests,
        latency=[
            *_latency("first token", [each.first_s for each in floor], [each.first_s for each in pdq]),
            *_latency("end", [each.end_s for each in floor], [each.end_s for each in pdq]),
        ],
        cpu=[
            *(_cpu(process, _by_round(floor, process), _by_round(pdq, process)) for process in (*PROCESSES, TOTAL)),
            _cpu(LESS_ENGINE, _by_round(floor, TOTAL), [ms - engine_ms for ms in _by_round(pdq, TOTAL)]),
        ],
        batches=sum(each.batches for each in pdq) / requests,
    )


def _latency(name: str, floor: Sequence[Sequence[float]], pdq: Sequence[Sequence[float]]) -> Iterator[Row]:
    """Both percentiles of one time; each path's requests by round, in seconds."""
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        by_round = ratios([percentile(each, share) for each in pdq], [percentile(each, share) for each in floor])
        yield Row(f"{name} {label}", _pooled(floor, share) * 1e3, _pooled(pdq, share) * 1e3, by_round)


def _pooled(rounds: Sequence[Sequence[float]], share: float) -> float:
    return percentile([value for each in rounds for value in each], share)


def _by_round(rounds: Sequence[Round], process: str) -> list[float]:
    return [each.cpu_ms(process) for each in rounds]


def _cpu(name: str, floor_ms: Sequence[float], pdq_ms: Sequence[float]) -> Row:
    return Row(name, percentile(floor_ms, 0.5), percentile(pdq_ms, 0.5), ratios(pdq_ms, floor_ms))


def _table(result: Concurrency) -> list[str]:
    title = f"{result.at_once} at a time, {result.requests} requests a path, {result.batches:.1f} batches each"
    return [
        f"{title:<52}{'floor':>10}{'pdq':>10}{'ratio':>9}   min … max of the rounds",
        *(_line("latency ms", row) for row in result.latency),
        *(_line("CPU ms per request", row) for row in result.cpu),
    ]


def _line(kind: str, row: Row) -> str:
    ratio = row.ratio
    told = f"{ratio.median:>9.2f}   {ratio.min:.2f} … {ratio.max:.2f}" if ratio else f"{'-':>9}"
    return f"  {kind:<20}{row.name:<30}{row.floor_ms:>10.2f}{row.pdq_ms:>10.2f}{told}"
