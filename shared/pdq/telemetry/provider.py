"""The tracer of one process: where its spans begin, and where they go."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind

from pdq import __version__, subjects
from pdq.errors import Misconfigured
from pdq.otlp import Value
from pdq.telemetry import context, export
from pdq.telemetry.record import Record, Sink, context_of_trace, context_under, own
from pdq.telemetry.spans import Span, StageSpan

CLOSE_S = 3.0
FILE_DELAY_MS = 100
"""How long a span waits for its line in the file: `pdq trace` reads it right after the answer."""


class TraceSettings(Protocol):
    """`pdq.settings.TelemetrySettings` has this shape."""

    @property
    def file(self) -> str: ...
    @property
    def sample(self) -> float: ...


class Telemetry:
    """Begins the spans of one process. With neither a collector nor a file it makes none, and hands the
    caller's trace context on as it came."""

    def __init__(self, service: str, sample: float, instance: str, exporters: list[tuple[export.Exporter, int | None]]):
        """`exporters`: each with the delay of its batches in ms; None is OpenTelemetry's default."""
        self._on = bool(exporters)
        self._sampler = _ratio(sample)
        self._exporters = [exporter for exporter, _ in exporters]
        # The SDK's batches hand on whatever they are given.
        made: list[tuple[Any, int | None]] = [*exporters]
        self._batches = [BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms) for exporter, delay_ms in made]
        resource = Resource.create(_identity(service, instance))
        ends: tuple[Any, ...] = tuple(batches.on_end for batches in self._batches)
        self._sink = Sink(resource, InstrumentationScope("pdq", __version__), ends)

    @classmethod
    def start(
        cls, service: str, settings: TraceSettings, instance: str, environ: Mapping[str, str] = os.environ
    ) -> Telemetry:
        """Spans of `service` (`router`, `prefill`, ...) go to `settings.file` and to the collector that
        OpenTelemetry's own variables name, if any. Raises Misconfigured."""
        export.quiet_sdk()
        exporters: list[tuple[export.Exporter, int | None]] = []
        if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return cls(service, settings.sample, instance, exporters)
        if settings.file:
            exporters.append((export.Announced(export.FileExporter(settings.file), settings.file), FILE_DELAY_MS))
        if (collector := export.collector(environ)) is not None:
            exporters.append((collector, None))
        return cls(service, settings.sample, instance, exporters)

    def submit(self, request: str, tenant: str, model: str, headers: Mapping[str, str] | None = None) -> Span:
        """The root of a request's trace, made by its client; it ends when the answer does.

        `headers` may hold the context of a trace that the client's own caller began.
        """
        parent = context.extract(headers or {})
        span, recorded = self._begin(parent, context.random_trace_id)
        if not recorded:
            return Span(span)
        attributes = _attributes("send", subjects.SUBMIT, request, tenant, model, {})
        above = parent if parent.is_valid else None
        return Span(span, Record(self._sink, "submit", span, above, time.time_ns(), attributes, SpanKind.PRODUCER))

    def process(
        self,
        stage: str,
        destination: str,
        headers: Mapping[str, str] | None,
        *,
        request: str,
        worker: str,
        stored_ns: int,
        tenant: str = "",
        model: str = "",
        attempt: int = 0,
        message_id: str = "",
        deliveries: int = 0,
    ) -> StageSpan:
        """One job at one stage, from its delivery (now) until `end`.

        The message's context is its parent and its link. A child `queue` lasts from `stored_ns`, the
        broker's stored time in Unix nanoseconds, until now. What is not known yet (attempt, tenant) may be
        left out and set later.
        """
        now_ns = time.time_ns()
        wait_ns = max(0, now_ns - stored_ns) if stored_ns else 0
        parent = context.extract(headers or {})
        span, recorded = self._begin(parent, lambda: context.trace_id_of(destination, request, stored_ns))
        if not recorded:
            return StageSpan(span, wait_ns / 1e9)
        delivered: dict[str, str | int] = {
            "messaging.message.id": message_id,
            "messaging.nats.delivery_attempt": deliveries,
            "pdq.worker.id": worker,
            "pdq.attempt": attempt,
            "pdq.stage": stage,
        }
        attributes = _attributes("process", destination, request, tenant, model, delivered)
        name = stage if stage in ("forward", "route") else f"process {stage}"
        above, links = (parent, [trace.Link(parent)]) if parent.is_valid else (None, [])
        record = Record(self._sink, name, span, above, now_ns, attributes, SpanKind.CONSUMER, links)
        made = StageSpan(span, wait_ns / 1e9, record)
        if wait_ns:
            made.child("queue", stored_ns, now_ns)
        return made

    def close(self, bound_s: float = CLOSE_S) -> None:
        """Write what has ended, for at most `bound_s`; what cannot be written by then is lost. Blocks."""
        closing = threading.Thread(target=self._shutdown, name="telemetry-close", daemon=True)
        closing.start()
        closing.join(bound_s)
        if closing.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()

    def _shutdown(self) -> None:
        for batches in self._batches:
            batches.shutdown()  # type: ignore[no-untyped-call]

    def _begin(self, parent: trace.SpanContext, trace_id: Callable[[], int]) -> tuple[trace.SpanContext, bool]:
        """A new span's context, and whether it is recorded: as its parent is, or where there is none, by its trace's
        id. What is not recorded under a parent hands the parent's own context on."""
        if not self._on or (parent.is_valid and not parent.trace_flags.sampled):
            return parent, False
        if parent.is_valid:
            return context_under(parent), True
        made = trace_id()
        sampled = self._sampler.should_sample(None, made, "").decision is Decision.RECORD_AND_SAMPLE
        return context_of_trace(made, sampled=sampled), sampled


def _ratio(sample: float) -> TraceIdRatioBased:
    if not 0.0 <= sample <= 1.0:
        raise Misconfigured(f"PDQ_TRACE_SAMPLE is {sample:g}: it must be from 0 to 1")
    return TraceIdRatioBased(sample)


def _identity(service: str, instance: str) -> dict[str, str]:
    return {
        "service.namespace": "pdq",
        "service.name": f"pdq-{service}",
        "service.version": __version__,
        "service.instance.id": instance,
    }


def _attributes(
    operation: str, destination: str, request: str, tenant: str, model: str, more: dict[str, str | int]
) -> dict[str, Value]:
    """Of a span about one message; what is not known is left out."""
    named: dict[str, str | int] = {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": destination,
        "pdq.request.id": request,
        "pdq.tenant": tenant,
        "pdq.model": model,
        "gen_ai.request.model": model,
        **more,
    }
    return own({name: value for name, value in named.items() if value})
