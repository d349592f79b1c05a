"""W3C trace context in message headers, and the ids of traces."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from random import getrandbits

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()
_PARENT, _STATE = "traceparent", "tracestate"
_USUAL = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def extract(headers: Mapping[str, str]) -> trace.SpanContext:
    """The caller's context; not valid (`is_valid`) when the headers hold none, or a malformed one."""
    # NATS keeps the case of header names, and some clients write `Traceparent`.
    found = {name.lower(): value for name, value in headers.items() if name.lower() in (_PARENT, _STATE)}
    if _PARENT not in found:
        return trace.INVALID_SPAN_CONTEXT
    if _STATE not in found and (usual := _USUAL.fullmatch(found[_PARENT])):
        trace_id, span_id, flags = (int(part, 16) for part in usual.groups())
        return trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(flags))
    return trace.get_current_span(_propagator.extract(found, Context())).get_span_context()


def inject(span: trace.SpanContext) -> dict[str, str]:
    """`traceparent` and, if there is one, `tracestate`; empty for a context that is not valid."""
    if not span.is_valid:
        return {}
    headers = {_PARENT: f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    if span.trace_state:
        headers[_STATE] = span.trace_state.to_header()
    return headers


def random_trace_id() -> int:
    return getrandbits(128) or 1


def trace_id_of(*message: object) -> int:
    """The id of a trace that begins with a message without a context.

    Such a message begins its trace at each of its deliveries; with the same id each time, its attempts are siblings in
    one trace (and are sampled alike).
    """
    digest = hashlib.sha256("\n".join(map(str, message)).encode()).digest()
    return int.from_bytes(digest[:16], "big")
