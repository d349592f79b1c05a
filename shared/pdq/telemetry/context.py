"""W3C trace context in message headers, and the ids of traces that nobody began."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


class _AnyCase(Getter[Mapping[str, str]]):
    """NATS keeps the case of header names, and some clients write `Traceparent`."""

    def get(self, carrier: Mapping[str, str], key: str) -> list[str] | None:
        found = [value for name, value in carrier.items() if name.lower() == key]
        return found or None

    def keys(self, carrier: Mapping[str, str]) -> list[str]:
        return list(carrier)


_any_case = _AnyCase()


def extract(headers: Mapping[str, str]) -> trace.SpanContext:
    """The caller's context; not valid (`is_valid`) when the headers hold none, or a malformed one."""
    context = _propagator.extract(headers, Context(), _any_case)
    return trace.get_current_span(context).get_span_context()


def inject(span: trace.SpanContext) -> dict[str, str]:
    """`traceparent` and, if there is one, `tracestate`; empty for a context that is not valid."""
    headers: dict[str, str] = {}
    _propagator.inject(headers, under(span))
    return headers


def under(span: trace.SpanContext) -> Context:
    """A context, never attached, that makes `span` the parent of what starts in it."""
    return trace.set_span_in_context(trace.NonRecordingSpan(span), Context())


class TraceIds(RandomIdGenerator):
    """Random ids, but for a trace whose id follows from the message that began it.

    A message published without a trace context begins a trace at each of its deliveries; with the same
    id each time, its attempts are siblings in one trace (and are sampled alike).
    """

    def __init__(self) -> None:
        self._chosen = threading.local()

    @contextmanager
    def of(self, *message: object) -> Iterator[None]:
        """While this is open, and on this thread, a new trace gets the id of `message`."""
        digest = hashlib.sha256("\n".join(map(str, message)).encode()).digest()
        self._chosen.id = int.from_bytes(digest[:16], "big")
        try:
            yield
        finally:
            del self._chosen.id

    def generate_trace_id(self) -> int:
        return getattr(self._chosen, "id", 0) or super().generate_trace_id()
