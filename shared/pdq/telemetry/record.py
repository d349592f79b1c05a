"""A span while it lasts. The SDK's own, which locks and checks at every call, costs several times as much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import getrandbits
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, Status, StatusCode

from pdq.otlp import Value

_UNSET = Status()

MAX_ATTRIBUTE = 1024
"""Characters kept of an attribute's value."""


class Sink(NamedTuple):
    """Where the spans of a process go, and what all of them say."""

    resource: Resource
    scope: InstrumentationScope
    on_end: Callable[[ReadableSpan], None]


class Record:
    """What one span says so far; `end` hands it over, and nothing may be added after that."""

    def __init__(
        self,
        sink: Sink,
        name: str,
        context: trace.SpanContext,
        parent: trace.SpanContext | None,
        start_ns: int,
        attributes: Mapping[str, Value],
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[trace.Link] = (),
    ) -> None:
        self.sink = sink
        self.context = context
        self._name = name
        self._parent = parent
        self._start_ns = start_ns
        self._kind = kind
        self._links = links
        self._attributes: dict[str, Value] = {}
        self._events: list[Event] = []
        self._status = _UNSET
        self.set(attributes)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Names without a dot get the prefix `pdq.`."""
        self._attributes.update(own(attributes))

    def event(self, name: str, at_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        self._events.append(Event(name, own(attributes or {}), at_ns))

    def fail(self, message: str) -> None:
        self._status = Status(StatusCode.ERROR, message)

    def end(self, at_ns: int) -> None:
        """An end before the start counts as the start."""
        self.sink.on_end(
            ReadableSpan(
                self._name,
                self.context,
                self._parent,
                self.sink.resource,
                self._attributes,
                self._events,
                self._links,
                self._kind,
                status=self._status,
                start_time=self._start_ns,
                end_time=max(self._start_ns, at_ns),
                instrumentation_scope=self.sink.scope,
            )
        )


def context_under(parent: trace.SpanContext) -> trace.SpanContext:
    """A new span's, in its parent's trace."""
    return trace.SpanContext(parent.trace_id, _span_id(), False, parent.trace_flags, parent.trace_state)


def context_of_trace(trace_id: int, *, sampled: bool) -> trace.SpanContext:
    """A new span's, which begins a trace."""
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if sampled else trace.TraceFlags.DEFAULT)
    return trace.SpanContext(trace_id, _span_id(), False, flags)


def own(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Names without a dot get the prefix `pdq.`, and long texts are cut."""
    return {
        name if "." in name else f"pdq.{name}": value[:MAX_ATTRIBUTE] if isinstance(value, str) else value
        for name, value in attributes.items()
    }


def _span_id() -> int:
    return getrandbits(64) or 1
