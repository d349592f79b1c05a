"""A span, while it lasts and until it is written. The SDK's own, which locks and checks at every call, costs several
times as much; only a collector's exporter is given one."""

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

MAX_ATTRIBUTE = 1024
"""Characters kept of an attribute's value."""


class Sink(NamedTuple):
    """Where the spans of a process go, and what all of them say."""

    resource: Resource
    scope: InstrumentationScope
    on_end: tuple[Callable[[Record], None], ...]


class Moment(NamedTuple):
    """An event of a span, at a Unix time in nanoseconds."""

    name: str
    at_ns: int
    attributes: dict[str, Value]


class Record:
    """What one span says so far; `end` hands it over, and nothing may be added after that."""

    __slots__ = (
        "attributes",
        "context",
        "end_ns",
        "events",
        "failure",
        "kind",
        "links",
        "name",
        "parent",
        "sink",
        "start_ns",
    )

    def __init__(
        self,
        sink: Sink,
        name: str,
        context: trace.SpanContext,
        parent: trace.SpanContext | None,
        start_ns: int,
        attributes: dict[str, Value],
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[trace.Link] = (),
    ) -> None:
        """attributes: as `own` makes them; they are the record's from here on."""
        self.sink = sink
        self.name = name
        self.context = context
        self.parent = parent
        self.start_ns = start_ns
        self.end_ns = 0
        self.kind = kind
        self.links = links
        self.attributes = attributes
        self.events: list[Moment] = []
        self.failure: str | None = None
        """What it failed with; None: it has not."""

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Names without a dot get the prefix `pdq.`."""
        self.attributes.update(own(attributes))

    def event(self, name: str, at_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        self.events.append(Moment(name, at_ns, own(attributes) if attributes else {}))

    def fail(self, message: str) -> None:
        self.failure = message

    def end(self, at_ns: int) -> None:
        """An end before the start counts as the start."""
        self.end_ns = max(self.start_ns, at_ns)
        for on_end in self.sink.on_end:
            on_end(self)

    def readable(self) -> ReadableSpan:
        """The same as the SDK has it."""
        return ReadableSpan(
            self.name,
            self.context,
            self.parent,
            self.sink.resource,
            self.attributes,
            [Event(event.name, event.attributes, event.at_ns) for event in self.events],
            self.links,
            self.kind,
            status=Status() if self.failure is None else Status(StatusCode.ERROR, self.failure),
            start_time=self.start_ns,
            end_time=self.end_ns,
            instrumentation_scope=self.sink.scope,
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
