"""Prometheus metrics of one service, in a registry of its own.

Label values are bounded, whatever clients send: a model that models.toml does not know counts as `other`,
and so does a reason beyond the first few dozen. Requests, tenants and workers are never labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from pdq import __version__
from pdq.errors import NewerVersion
from pdq.messages import TERMINAL, LocalCause, Order, StageName
from pdq.telemetry.spans import PhaseLike

OTHER = "other"
NONE = "none"
"""The order of a request that ended before one was chosen."""

MAX_VALUES = 48
"""Distinct values that a label without a fixed set can take."""

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_MS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOTAL = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
    163.84,
    327.68,
    655.36,
)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WORD = re.compile(r"[a-z0-9_]{1,40}\Z")

READY = "ready"
"""The KV of a handoff that promises some."""
MOVES = {"kv.load": "load", "kv.store": "store"}
"""Phases that move KV, and the `op` they count as."""


class Label:
    """The values one label may take: a fixed set, or the first `MAX_VALUES` plain words that come."""

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self._known = set(known or ())
        self._open = known is None

    def of(self, value: str) -> str:
        if value in self._known:
            return value
        if not self._open or len(self._known) >= MAX_VALUES or not _WORD.match(value):
            return OTHER
        self._known.add(value)
        return value


M = TypeVar("M", Counter, Histogram)


class Series(Generic[M]):
    """A metric's series by their label values, which are few: prometheus_client takes a lock to find one."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._found: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        found = self._found.get(values)
        if found is None:
            found = self._found[values] = self._metric.labels(*values)
        return found


class Metrics:
    """What a service counts. `models`: the slugs of models.toml. Safe from any thread."""

    def __init__(self, models: Iterable[str]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._model = Label(models)
        self._order = Label((*get_args(Order), NONE))
        self._outcome = Label(TERMINAL)
        self._stage = Label()
        self._reason = Label()
        self._cause = Label()
        self._stat = Label()
        self._part = Label()

        def counter(name: str, text: str, *labels: str) -> Series[Counter]:
            return Series(Counter(name, text, labels, registry=registry))

        def total(name: str, text: str) -> Counter:
            return Counter(name, text, registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Series[Histogram]:
            return Series(Histogram(name, text, labels, buckets=buckets, registry=registry))

        def spread(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._requests = counter("pdq_requests", "Requests that ended here, by how.", "model", "order", "outcome")
        self._decisions = counter("pdq_route_decisions", "Orders chosen, and why.", "order", "reason")
        self._fallbacks = counter(
            "pdq_order_fallbacks", "Requests to be prefilled apart whose prompt decode computes, and why.", "cause"
        )
        for cause in get_args(LocalCause):
            self._fallbacks.labels(cause)
        self._redeliveries = counter("pdq_redeliveries", "Jobs delivered more than once.", "stage")
        for stage in get_args(StageName):
            # From 0 on: an increase from nothing to 1 is none to Prometheus.
            self._redeliveries.labels(stage)
        self._given_back = counter("pdq_given_back", "Messages left for later or others, and why.", "stage", "cause")
        for stage in get_args(StageName):
            self._given_back.labels(stage, NewerVersion.code)
        self._preferred = counter(
            "pdq_decode_preference", "Jobs that preferred a worker, and what it came to.", "result"
        )
        for result in ("kept", "passed", "spilled"):
            self._preferred.labels(result)
        self._dead = counter("pdq_dead_letters", "Messages given up.", "stage", "reason")
        self._handoffs = counter("pdq_handoffs", "Handoffs to decode, by their KV: ready, or why there is none.", "kv")
        self._promised = total("pdq_kv_promised_tokens", "Tokens whose KV a handoff promised to decode.")
        self._loaded = total("pdq_kv_loaded_tokens", "Tokens whose KV decode loaded from the tiers.")
        self._local = total("pdq_kv_local_tokens", "Promised tokens whose KV decode's engine still had itself.")
        self._refused = counter("pdq_kv_refused", "Promises of KV that decode did not go by, and why.", "cause")
        self._refused.labels("contract")
        self._staged = counter(
            "pdq_kv_staged_tokens",
            "KV brought near for jobs that wait: used here, or lost.",
            "result",
        )
        for result in ("used", "lost"):
            self._staged.labels(result)
        self._bytes = counter("pdq_kv_bytes", "KV moved between the engine and the tiers.", "op")
        self._tokens = counter("pdq_engine_tokens", "Prompt tokens prefilled, and output tokens decoded.", "stage")
        self._durations = seconds("pdq_stage_duration_seconds", "Time in a stage or in a part of it.", _MS, "stage")
        self._waits = seconds("pdq_queue_wait_seconds", "From stored by the broker to delivered.", _MS, "stage")
        self._ttft = spread("pdq_ttft_seconds", "From the submit's stored time to the first token.", _TTFT)
        self._second = spread("pdq_second_token_seconds", "From the first output token to the second.", _MS)
        self._total = seconds(
            "pdq_request_duration_seconds", "From the submit's stored time to the end.", _TOTAL, "outcome"
        )
        self._tpot = spread("pdq_tpot_seconds", "Time per output token after the first.", _TPOT)
        self._busy = Gauge("pdq_worker_busy_slots", "Requests being worked on.", registry=registry)
        self._slots = Gauge("pdq_worker_slots", "Requests that can be worked on at one time.", registry=registry)
        self._engine = Gauge("pdq_engine_stat", "What the engine reports of itself.", ("stat",), registry=registry)
        self._start = Gauge(
            "pdq_worker_start_seconds",
            "What the start of this worker took; parts may overlap.",
            ("part",),
            registry=registry,
        )
        self._info = Info("pdq_worker", "Who this is.", registry=registry)

    def ended(self, model: str, order: str, outcome: str, seconds: float = 0.0) -> None:
        """A terminal event was written here. `order` may be empty: none had been chosen. `seconds`: since the
        submit was stored; 0 where that is not known."""
        self._requests.labels(self._model.of(model), self._order.of(order or NONE), self._outcome.of(outcome)).inc()
        if seconds > 0:
            self._total.labels(self._outcome.of(outcome)).observe(seconds)

    def routed(self, order: str, reason: str) -> None:
        self._decisions.labels(self._order.of(order), self._reason.of(reason)).inc()

    def fell_back(self, cause: LocalCause) -> None:
        """A request that was to be prefilled apart is computed by decode."""
        self._fallbacks.labels(cause).inc()

    def redelivered(self, stage: str) -> None:
        self._redeliveries.labels(self._stage.of(stage)).inc()

    def gave_back(self, stage: str, cause: str) -> None:
        """A message that could not be worked on now, or here: `cause` is the error's code."""
        self._given_back.labels(self._stage.of(stage), self._cause.of(cause)).inc()

    def preferred(self, result: str) -> None:
        """A job that prefers a worker was delivered here: `kept`, `passed` or `spilled` (`pdq.stage.preference`)."""
        self._preferred.labels(result).inc()

    def dead_letter(self, stage: str, reason: str) -> None:
        self._dead.labels(self._stage.of(stage), self._reason.of(reason)).inc()

    def handoff(self, cause: str) -> None:
        """Prefill handed over. `cause`: why it promises no KV; empty when it does."""
        self._handoffs.labels(self._cause.of(cause or READY)).inc()

    def kv(self, promised_tokens: int, loaded_tokens: int, local_tokens: int = 0, refused: str = "") -> None:
        """What decode was promised, loaded, and needed not load; only what was promised counts as local.
        `refused`: why it did not go by the promise."""
        self._promised.inc(promised_tokens)
        self._loaded.inc(loaded_tokens)
        self._local.inc(min(local_tokens, promised_tokens))
        if refused:
            self._refused.labels(self._cause.of(refused)).inc()

    def staged(self, tokens: int, *, used: bool) -> None:
        """KV that was brought near while its request waited; used: the request is decoded here."""
        self._staged.labels("used" if used else "lost").inc(tokens)

    def stage(self, stage: str, seconds: float) -> None:
        self._durations.labels(self._stage.of(stage.replace(".", "_"))).observe(seconds)

    def phase(self, phase: PhaseLike) -> None:
        """A part of a stage: `kv.store` counts as stage `kv_store`. Tokens and KV bytes count too."""
        self.stage(phase.name, max(0, phase.end_ns - phase.start_ns) / 1e9)
        if phase.name in MOVES:
            self._bytes.labels(MOVES[phase.name]).inc(int(phase.attributes.get("pdq.kv.bytes", 0)))
        elif phase.name.startswith("engine."):
            self._tokens.labels(self._stage.of(phase.name[7:])).inc(int(phase.attributes.get("pdq.tokens", 0)))
        times = dict(phase.events)
        if {"first_token", "second_token"} <= times.keys():
            self._second.observe((times["second_token"] - times["first_token"]) / 1e9)

    def queue_wait(self, stage: str, seconds: float) -> None:
        self._waits.labels(self._stage.of(stage)).observe(seconds)

    def ttft(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def tpot(self, seconds: float) -> None:
        self._tpot.observe(seconds)

    def slots(self, busy: int, slots: int) -> None:
        self._busy.set(busy)
        self._slots.set(slots)

    def worker(self, role: str, model: str, engine: str = "") -> None:
        """Say who this is: `pdq_worker_info{role,model,engine,version} 1`."""
        self._info.info({"role": role, "model": self._model.of(model), "engine": engine, "version": __version__})

    def started(self, parts_s: Mapping[str, float]) -> None:
        """The worker is ready; seconds by part of its start, and `total`."""
        for part, seconds in parts_s.items():
            self._start.labels(self._part.of(part)).set(seconds)

    def engine(self, stats: Mapping[str, Any]) -> None:
        """Numbers that the engine reports; whatever is not a number is left out."""
        for name, value in stats.items():
            if isinstance(value, bool | int | float):
                self._engine.labels(self._stat.of(name)).set(value)

    def text(self) -> bytes:
        """Prometheus text, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)
