"""What records amount to. Pure; the definitions are those of `vllm bench serve` where it has them (docs/bench.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from pdq.bench.records import INTERRUPTED, Record
from pdq.errors import Rejected

SLOS = ("ttft", "tpot", "e2el")
PERCENTILES = (50, 90, 95, 99)

Slos = Mapping[str, float]
"""Milliseconds that a request may take, by metric."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution. All 0 where there is nothing to tell of (`count` is 0)."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of the requests that were not warm-up. Latencies are of those that succeeded, in milliseconds."""

    completed: int
    failed: int
    interrupted: int
    """They ran when the load was stopped, and count for nothing else."""
    errors: dict[str, int]
    """How many failed, by code."""
    duration_s: float
    """From when the first was due to the end of the last."""
    input_tokens: int
    output_tokens: int
    request_throughput: float
    request_goodput: float | None
    """Requests a second that met all objectives; None: there were none."""
    good_fraction: float | None
    """Of all that completed or failed."""
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    """Tokens in the best whole second."""
    peak_concurrent: int
    """Requests that ran in one and the same second."""
    tokens_per_chunk: float
    ttft_ms: Spread
    ttst_ms: Spread
    """From the first token to the second."""
    tpot_ms: Spread
    itl_ms: Spread
    """Gaps between chunks."""
    gap_ms: Spread
    """The same gaps, each counted for as long as it lasts: the gap in which one finds a stream at a random moment."""
    e2el_ms: Spread
    lag_ms: Spread
    """How much later than planned requests were sent, those that failed too."""
    held: int
    """Requests that waited because `--max-in-flight` ran: the load was not open any more."""


def slos(words: Iterable[str]) -> dict[str, float]:
    """Of `ttft:500`: milliseconds by metric. Raises Rejected."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in SLOS or not 0 < found[name] < math.inf:
            expected = f"a metric ({', '.join(SLOS)}), a colon and milliseconds"
            raise Rejected(f"objective {word!r} is not {expected}", code="usage", param="goodput")
    return found


def summarise(records: Iterable[Record], wanted: Slos | None = None) -> Summary:
    """What the records amount to. `wanted`: the objectives of goodput."""
    counted = [record for record in records if not record.warm_up]
    ended = [record for record in counted if record.error != INTERRUPTED]
    done = [record for record in ended if record.succeeded]
    duration_s = _duration_s(ended)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_input, num_output = sum(r.input_tokens for r in done), sum(r.output_tokens for r in done)
    good = sum(is_good(record, wanted) for record in done) if wanted else 0
    gaps = [gap for record in done for gap in gaps_s(record)]
    tokens_s, running = by_second(done)
    num_chunks = sum(len(record.chunks) for record in done)
    return Summary(
        completed=len(done),
        failed=len(ended) - len(done),
        interrupted=len(counted) - len(ended),
        errors=dict(Counter(record.error for record in ended if record.error).most_common()),
        duration_s=duration_s,
        input_tokens=num_input,
        output_tokens=num_output,
        request_throughput=len(done) * per_s,
        request_goodput=good * per_s if wanted else None,
        good_fraction=good / max(1, len(ended)) if wanted else None,
        output_throughput=num_output * per_s,
        total_token_throughput=(num_input + num_output) * per_s,
        peak_output_throughput=max(tokens_s, default=0.0),
        peak_concurrent=max(running, default=0),
        tokens_per_chunk=num_output / num_chunks if num_chunks else 0.0,
        ttft_ms=spread(ttft_s(record) for record in done if record.chunks),
        ttst_ms=spread(value for record in done if (value := ttst_s(record)) is not None),
        tpot_ms=spread(tpot_s(record) for record in done if record.output_tokens > 1),
        itl_ms=spread(gaps),
        gap_ms=by_duration(gaps),
        e2el_ms=spread(record.end_s - record.sent_s for record in done),
        lag_ms=spread(record.sent_s - record.planned_s for record in counted),
        held=sum(record.held for record in counted),
    )


# ---- one request


def ttft_s(record: Record) -> float:
    return record.chunks[0][0]


def tpot_s(record: Record) -> float:
    """Seconds a token after the first; 0 for an answer of one."""
    if record.output_tokens < 2 or not record.chunks:
        return 0.0
    return (record.end_s - record.sent_s - ttft_s(record)) / (record.output_tokens - 1)


def ttst_s(record: Record) -> float | None:
    """From the first token to the second. Where chunks do not tell how many tokens they are, to the second chunk."""
    if record.output_tokens < 2 or not record.chunks:
        return None
    if record.chunks[0][1] > 1:
        return 0.0
    return record.chunks[1][0] - record.chunks[0][0] if len(record.chunks) > 1 else None


def gaps_s(record: Record) -> list[float]:
    return [after - before for (before, _), (after, _) in pairwise(record.chunks)]


def is_good(record: Record, wanted: Slos) -> bool:
    took = {"ttft": ttft_s(record) if record.chunks else math.inf, "tpot": tpot_s(record)}
    took["e2el"] = record.end_s - record.sent_s
    return all(took[name] <= most_ms / 1000 for name, most_ms in wanted.items())


# ---- many


def spread(seconds: Iterable[float]) -> Spread:
    """A distribution of seconds, in milliseconds. Percentiles are linear between the nearest two."""
    values = sorted(1000 * value for value in seconds)
    if not values:
        return Spread()
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    p50, p90, p95, p99 = (percentile(values, q) for q in PERCENTILES)
    return Spread(count=len(values), mean=mean, std=std, p50=p50, p90=p90, p95=p95, p99=p99, max=values[-1])


def percentile(values: Sequence[float], q: float) -> float:
    """Of sorted values, at least one; `q` in percent."""
    place = (len(values) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def by_duration(seconds: Iterable[float]) -> Spread:
    """A distribution of durations (seconds; told in milliseconds), each weighted by itself."""
    values = sorted(1000 * value for value in seconds if value > 0)
    total = math.fsum(values)
    if not values:
        return Spread()
    mean = math.fsum(value * value for value in values) / total
    std = math.sqrt(math.fsum(value * (value - mean) ** 2 for value in values) / total)
    p50, p90, p95, p99 = (_weighted(values, total * q / 100) for q in PERCENTILES)
    return Spread(count=len(values), mean=mean, std=std, p50=p50, p90=p90, p95=p95, p99=p99, max=values[-1])


def _weighted(values: Sequence[float], until: float) -> float:
    """The value at which the sum of sorted values reaches `until`."""
    passed = 0.0
    for value in values:
        passed += value
        if passed >= until:
            return value
    return values[-1]


def by_second(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """For each second since the first was sent: output tokens, and requests that ran. Where chunks do not tell how
    many tokens they are, those of an answer are spread over its chunks evenly."""
    if not records:
        return [], []
    first = min(record.sent_s for record in records)
    seconds = math.ceil(max(record.end_s for record in records) - first) + 1
    tokens, running = [0.0] * seconds, [0] * seconds
    for record in records:
        even = record.output_tokens / max(1, len(record.chunks))
        for at_s, num in record.chunks:
            tokens[int(record.sent_s + at_s - first)] += num or even
        for second in range(int(record.sent_s - first), int(record.end_s - first) + 1):
            running[second] += 1
    return tokens, running


def _duration_s(records: Sequence[Record]) -> float:
    if not records:
        return 0.0
    return max(record.end_s for record in records) - min(record.planned_s for record in records)
