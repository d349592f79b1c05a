"""Where spans go: an OpenTelemetry collector over HTTP, and a file of OTLP JSON.

Both run in the thread of a batch processor. A destination that fails costs spans, never a request, and
one line of log when it begins to fail and one when it recovers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from opentelemetry import trace
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from pdq import otlp
from pdq.errors import Misconfigured
from pdq.telemetry.record import Record

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables, the more specific first; this and the SDK read them."""

NOISY = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal", "opentelemetry.trace.span")
"""Loggers that repeat themselves while a collector is down, or quote headers that a client sent."""

_UNSET = otlp.SpanStatus()
_KIND = {kind: kind.value + 1 for kind in trace.SpanKind}
_CONTEXT_KNOWN, _REMOTE = 0x100, 0x200
"""OTLP's span flags: it is known whether the parent is remote, and it is."""


class Exporter(Protocol):
    """The SDK's SpanExporter, for records."""

    def export(self, spans: Sequence[Record]) -> SpanExportResult: ...
    def shutdown(self) -> None: ...


class Announced:
    """An exporter whose failing and recovering are logged once each."""

    def __init__(self, inner: Exporter, destination: str) -> None:
        self._inner = inner
        self._destination = destination
        self._failing = False

    def export(self, spans: Sequence[Record]) -> SpanExportResult:
        result = self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("spans are lost until they can be exported again", extra={"destination": self._destination})
        elif self._failing and not failed:
            log.info("spans are exported again", extra={"destination": self._destination})
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class Readable:
    """An exporter of the SDK's, which takes the SDK's spans."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner

    def export(self, spans: Sequence[Record]) -> SpanExportResult:
        return self._inner.export([span.readable() for span in spans])

    def shutdown(self) -> None:
        self._inner.shutdown()


class FileExporter:
    """Appends each batch as one line. Several processes may share a file, and it may be moved away."""

    def __init__(self, path: str) -> None:
        """Raises Misconfigured when the file cannot be written."""
        self._path = path
        try:
            os.close(self._open())
        except OSError as exc:
            raise Misconfigured(f"PDQ_TRACE_FILE: cannot write {path}: {exc.strerror}") from exc

    def export(self, spans: Sequence[Record]) -> SpanExportResult:
        try:
            self._append(otlp.encode(export_request(spans)) + b"\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Every batch is in the file already."""

    def _append(self, line: bytes) -> None:
        descriptor = self._open()
        try:
            # One write: lines of other processes stay whole. A full disk can cut it; readers skip such lines.
            if os.write(descriptor, line) < len(line):
                os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def quiet_sdk() -> None:
    """Silence what `Announced` says once, and what would let a client write to the log."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def collector(environ: Mapping[str, str]) -> Exporter | None:
    """An exporter over OTLP/HTTP when a collector's endpoint is set. Raises Misconfigured."""
    endpoint = next((environ[name] for name in ENDPOINTS if environ.get(name)), "")
    if not endpoint:
        return None
    # Imported only when used: it takes longer than all else a command line does.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    try:
        return Announced(Readable(OTLPSpanExporter()), endpoint.rpartition("@")[2])
    except ValueError as exc:
        raise Misconfigured(f"one of OpenTelemetry's OTEL_EXPORTER_OTLP_* variables is wrong: {exc}") from exc


def export_request(spans: Iterable[Record]) -> otlp.ExportRequest:
    """OTLP's form of spans, of which those of one process are in a row."""
    groups = ((found[0].sink, found) for _, each in groupby(spans, lambda s: id(s.sink)) if (found := [*each]))
    return otlp.ExportRequest(
        resource_spans=tuple(
            otlp.ResourceSpans(
                resource=otlp.Resource(attributes=otlp.attributes(sink.resource.attributes)),
                scope_spans=(
                    otlp.ScopeSpans(
                        scope=otlp.Scope(name=sink.scope.name, version=sink.scope.version or ""),
                        spans=tuple(map(_wire, found)),
                    ),
                ),
            )
            for sink, found in groups
        )
    )


def _wire(span: Record) -> otlp.WireSpan:
    context, parent = span.context, span.parent
    return otlp.WireSpan(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        trace_state=_state(context),
        parent_span_id=f"{parent.span_id:016x}" if parent else "",
        flags=_flags(context, parent),
        name=span.name,
        kind=_KIND[span.kind],
        start_time_unix_nano=str(span.start_ns),
        end_time_unix_nano=str(span.end_ns),
        attributes=otlp.attributes(span.attributes),
        events=tuple(
            [
                otlp.SpanEvent(
                    time_unix_nano=str(event.at_ns), name=event.name, attributes=otlp.attributes(event.attributes)
                )
                for event in span.events
            ]
        ),
        links=tuple(map(_link, span.links)),
        status=_UNSET if span.failure is None else otlp.SpanStatus(message=span.failure, code=otlp.STATUS_ERROR),
    )


def _state(context: trace.SpanContext) -> str:
    return context.trace_state.to_header() if context.trace_state else ""


def _link(link: trace.Link) -> otlp.SpanLink:
    return otlp.SpanLink(
        trace_id=f"{link.context.trace_id:032x}",
        span_id=f"{link.context.span_id:016x}",
        trace_state=_state(link.context),
        flags=_flags(link.context, link.context),
    )


def _flags(context: trace.SpanContext, parent: trace.SpanContext | None) -> int:
    return context.trace_flags | _CONTEXT_KNOWN | (_REMOTE if parent and parent.is_remote else 0)
