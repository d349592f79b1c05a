"""What came of each set-up under each load: all rounds together. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pdq.bench import metrics
from pdq.bench.compare import loads
from pdq.bench.compare.kv import KvCount
from pdq.bench.compare.loads import Kind
from pdq.bench.compare.setups import Setup
from pdq.bench.metrics import Slos, Spread
from pdq.bench.records import Record

NOT_LOADED = "kv_not_loaded"
STALL = 5.0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one set-up in one round; or what kept it from that."""

    setup: str
    load: loads.Name
    round: int
    records: tuple[Record, ...] = ()
    kv: KvCount | None = None
    """None: nothing is promised here."""
    error: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One set-up under one load, all rounds together. Latencies are of answers that succeeded, in milliseconds."""

    setup: str
    load: loads.Name
    error: str = ""
    """Why the figures do not count, or why there are none. Empty: they do."""
    completed: int = 0
    failed: int = 0
    errors: dict[str, int] = {}
    itl_ms: Spread = Spread()
    """Gaps between chunks of short chats."""
    itl_p999_ms: float = 0.0
    stall_fraction: float = 0.0
    """Of these gaps, those that are longer than `STALL` times their median."""
    gap_ms: Spread = Spread()
    """The same gaps, each counted for as long as it lasts."""
    ttft_ms: Spread = Spread()
    """Of short chats."""
    ttft_long_ms: Spread = Spread()
    """Of long prompts."""
    tokens_per_s: float = 0.0
    """Of all answers, from when the first request was due to the end of the last."""
    good_per_s: float | None = None
    good_fraction: float | None = None
    lag_p99_ms: float = 0.0
    """How much later than planned requests were sent."""
    kv: KvCount | None = None

    @property
    def counts(self) -> bool:
        return not self.error


def row(setup: Setup, load: loads.Name, runs: Sequence[Run], slos: Slos) -> Row:
    """Of all rounds of one set-up under one load."""
    records = [record for run in runs for record in run.records]
    whole = metrics.summarise(records, slos)
    chats, longs = (metrics.summarise(_of(kind, records)) for kind in ("chat", "long"))
    gaps = sorted(gap for record in _of("chat", records) for gap in counted_gaps_s(record))
    each = [metrics.summarise(run.records, slos) for run in runs if run.records]
    seconds = math.fsum(summary.duration_s for summary in each)
    counts = [run.kv for run in runs if run.kv is not None]
    kv = sum(counts, KvCount()) if counts else None
    good = [summary.request_goodput for summary in each if summary.request_goodput is not None]
    return Row(
        setup=setup.name,
        load=load,
        error=_error(setup, runs, whole, kv),
        completed=whole.completed,
        failed=whole.failed,
        errors=whole.errors,
        itl_ms=chats.itl_ms,
        itl_p999_ms=1000 * metrics.percentile(gaps, 99.9) if gaps else 0.0,
        stall_fraction=stall_fraction(gaps),
        gap_ms=chats.gap_ms,
        ttft_ms=chats.ttft_ms,
        ttft_long_ms=longs.ttft_ms,
        tokens_per_s=whole.output_tokens / seconds if seconds else 0.0,
        good_per_s=math.fsum(good) / len(good) if good else None,
        good_fraction=whole.good_fraction,
        lag_p99_ms=whole.lag_ms.p99,
        kv=kv,
    )


def counted_gaps_s(record: Record) -> list[float]:
    """Of an answer that succeeded after the warm-up; of others none."""
    return metrics.gaps_s(record) if record.succeeded and not record.warm_up else []


def stall_fraction(gaps: Sequence[float]) -> float:
    """`gaps`: sorted."""
    if not gaps:
        return 0.0
    least = STALL * metrics.percentile(gaps, 50)
    return sum(gap > least for gap in gaps) / len(gaps)


def _of(kind: Kind, records: Iterable[Record]) -> list[Record]:
    return [record for record in records if loads.kind(record) == kind]


def _error(setup: Setup, runs: Sequence[Run], whole: metrics.Summary, kv: KvCount | None) -> str:
    if told := next((run.error for run in runs if run.error), ""):
        return told
    if not whole.completed:
        return "no request succeeded"
    if setup.disaggregated and kv is not None and not kv.moved:
        return (
            f"{NOT_LOADED}: {kv.loaded_tokens} of {kv.promised_tokens} promised tokens loaded, the rest computed anew"
        )
    return ""
