"""What the broker holds now, as metrics of whoever reads it: the router.

A reading is shown whole or not at all: when the broker does not answer, the series of its queues end, so that
no alert looks at old numbers, and `pdq_broker_up` is 0. Several routers tell the same: take the maximum, not the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdq.telemetry.metrics import Label, Metrics

ANY = "any"
"""Model and priority of a queue that holds all of them: that of submits."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one stage, model and priority. Ages are seconds since the job was stored; 0 when there is none."""

    stage: str
    model: str
    priority: str
    depth: int
    """Waiting for their first delivery."""
    claimed: int
    """Delivered and not settled: running, or waiting to be delivered again."""
    oldest_s: float
    """Of those waiting for their first delivery."""
    oldest_unsettled_s: float
    """Of all."""


class StageLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one stage and model whose beats come, and the slots they have together."""

    stage: str
    model: str
    workers: int = 0
    slots: int = 0
    busy: int = 0
    contracts: frozenset[str] = frozenset()
    """Fingerprints of their KV contracts."""


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    messages: int
    bytes: int
    max_bytes: int
    """0: without a limit."""
    behind: int = 0
    """Replicas that are away, or lack what the leader has."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read at one time. `took_s`: how long the broker needed for it; `stores`: whether it kept what was
    published last."""

    queues: tuple[Queue, ...]
    loads: tuple[StageLoad, ...]
    streams: tuple[Stream, ...]
    took_s: float
    stores: bool = True


class BrokerMetrics(Collector):
    """Shows the newest reading. `models`: slugs of models.toml; others count as `other`."""

    def __init__(self, metrics: Metrics, models: Iterable[str]) -> None:
        self._model = Label((ANY, *models))
        self._reading: Reading | None = None
        metrics.registry.register(self)

    def show(self, reading: Reading | None) -> None:
        """None: the broker did not answer."""
        self._reading = reading

    def collect(self) -> Iterator[GaugeMetricFamily]:
        reading = self._reading
        yield _gauge("pdq_broker_up", "Whether the broker answered the last time it was asked.", float(bool(reading)))
        if reading is not None:
            yield _gauge("pdq_broker_read_seconds", "How long the broker took to answer all of it.", reading.took_s)
            yield _gauge("pdq_broker_stores", "Whether the broker keeps what is published.", float(reading.stores))
            yield from self._queues(reading.queues)
            yield from self._loads(reading.loads)
            yield from _streams(reading.streams)

    def _queues(self, queues: tuple[Queue, ...]) -> Iterator[GaugeMetricFamily]:
        labels = ("stage", "model", "priority")
        depth = GaugeMetricFamily("pdq_queue_depth", "Jobs that wait for a worker.", labels=labels)
        claimed = GaugeMetricFamily("pdq_queue_claimed", "Jobs delivered and not settled.", labels=labels)
        oldest = GaugeMetricFamily("pdq_queue_oldest_seconds", "Age of the oldest job that waits.", labels=labels)
        unsettled = GaugeMetricFamily(
            "pdq_queue_oldest_unsettled_seconds", "Age of the oldest job, waiting or claimed.", labels=labels
        )
        for queue in queues:
            values = (queue.stage, self._model.of(queue.model), queue.priority)
            depth.add_metric(values, queue.depth)
            claimed.add_metric(values, queue.claimed)
            oldest.add_metric(values, queue.oldest_s)
            unsettled.add_metric(values, queue.oldest_unsettled_s)
        yield from (depth, claimed, oldest, unsettled)

    def _loads(self, loads: tuple[StageLoad, ...]) -> Iterator[GaugeMetricFamily]:
        labels = ("stage", "model")
        workers = GaugeMetricFamily("pdq_workers", "Workers whose beats come.", labels=labels)
        slots = GaugeMetricFamily("pdq_stage_slots", "Requests they can work on at one time.", labels=labels)
        busy = GaugeMetricFamily("pdq_stage_busy_slots", "Requests they work on.", labels=labels)
        contracts = GaugeMetricFamily(
            "pdq_contracts",
            "KV contracts among the live workers of all stages; more than one exchange no KV.",
            labels=("model",),
        )
        for load in loads:
            values = (load.stage, self._model.of(load.model))
            workers.add_metric(values, load.workers)
            slots.add_metric(values, load.slots)
            busy.add_metric(values, load.busy)
        for model, found in contracts_of(loads).items():
            contracts.add_metric((self._model.of(model),), len(found))
        yield from (workers, slots, busy, contracts)


def contracts_of(loads: Iterable[StageLoad]) -> dict[str, frozenset[str]]:
    """Fingerprints of the KV contracts of each model's live workers, all stages together."""
    found: dict[str, frozenset[str]] = {}
    for load in loads:
        found[load.model] = found.get(load.model, frozenset()) | load.contracts
    return found


def _streams(streams: tuple[Stream, ...]) -> Iterator[GaugeMetricFamily]:
    messages = GaugeMetricFamily("pdq_stream_messages", "Messages a stream holds.", labels=("stream",))
    size = GaugeMetricFamily("pdq_stream_bytes", "Bytes a stream holds.", labels=("stream",))
    used = GaugeMetricFamily("pdq_stream_used_ratio", "Share of a stream's byte limit, 0 to 1.", labels=("stream",))
    behind = GaugeMetricFamily("pdq_stream_replicas_behind", "Replicas that are not current.", labels=("stream",))
    for stream in streams:
        messages.add_metric((stream.name,), stream.messages)
        size.add_metric((stream.name,), stream.bytes)
        behind.add_metric((stream.name,), stream.behind)
        if stream.max_bytes:
            used.add_metric((stream.name,), stream.bytes / stream.max_bytes)
    yield from (messages, size, used, behind)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
