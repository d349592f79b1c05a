"""Gauges of /metrics that count work: whatever they are, they must be zero once nothing is left to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdq import subjects
from pdq.engines.sim import COUNTERS
from prometheus_client.parser import text_string_to_metric_families

NO_WORK = frozenset(
    {
        "pdq_broker_read_seconds",
        "pdq_broker_stores",
        "pdq_broker_up",
        "pdq_contracts",
        "pdq_stage_slots",
        "pdq_stream_bytes",
        "pdq_stream_used_ratio",
        "pdq_worker_info",
        "pdq_worker_slots",
        "pdq_worker_start_seconds",
        "pdq_workers",
    }
)
"""Gauges that tell of something else; so do those of the process (`process_`)."""
KEEP = frozenset({subjects.DEAD, subjects.WORKERS})
"""Streams that hold messages while nothing is left to do. The log does, too, until it is old enough."""
MUST_MOVE = (
    "pdq_worker_busy_slots",
    "pdq_engine_stat",
    "pdq_queue_claimed",
    "pdq_stage_busy_slots",
    "pdq_stream_messages",
)
"""Gauges that a run must have seen above zero, or their zeros at its end would say nothing."""

Series = dict[str, float]
"""Value by name and labels, as Prometheus shows them."""


def work(text: str) -> Series:
    """The gauges of one service that count work. `text`: its /metrics."""
    return {_shown(name, labels): value for name, labels, value in _gauges(text)}


def _gauges(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in text_string_to_metric_families(text):
        # `_created` is when a counter began.
        if family.type != "gauge" or family.name in NO_WORK or family.name.startswith("process_"):
            continue
        if family.name.endswith("_created"):
            continue
        for sample in family.samples:
            if sample.labels.get("stream") not in KEEP and sample.labels.get("stat") not in COUNTERS:
                yield sample.name, sample.labels, sample.value


def _shown(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def log_messages(series: str) -> bool:
    """Whether a series counts the log, which empties only with its age."""
    return f'stream="{subjects.LOG}"' in series
