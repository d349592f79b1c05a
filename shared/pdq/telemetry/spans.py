"""Spans of a request's trace: what a client, a router and a worker say they did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import getrandbits
from types import TracebackType
from typing import Protocol, Self

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import StatusCode

from pdq.errors import Interrupted, PdqError
from pdq.messages import KvReport, Sampling, Usage
from pdq.otlp import Value
from pdq.telemetry import context

MAX_ATTRIBUTE = 1024
"""Characters kept of an attribute's value."""

MAX_TEXT = 256
"""Characters kept of an error's message."""


class PhaseLike(Protocol):
    """What an engine did for a request: `pdq.engines.base.Phase` has this shape. Times are Unix nanoseconds."""

    @property
    def name(self) -> str: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, str | int | float | bool]: ...
    @property
    def events(self) -> tuple[tuple[str, int], ...]: ...


def own(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Names without a dot get the prefix `pdq.`."""
    return {name if "." in name else f"pdq.{name}": value for name, value in attributes.items()}


class Span:
    """One span, never made current. A span that is not sampled takes every call and does nothing.

    As a context manager it ends with the block: `ok`, or the cause of an `Interrupted` (`cancelled` for a
    cancelled task or a closed generator), or `failed` with the error's code. The error's text is not
    recorded, as it may quote a prompt; whoever knows a safe message calls `fail`.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._failed = False

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty when there is no trace at all."""
        found = self._span.get_span_context()
        return trace.format_trace_id(found.trace_id) if found.is_valid else ""

    @property
    def traceparent(self) -> str:
        return self.headers().get("traceparent", "")

    def headers(self) -> dict[str, str]:
        """`traceparent` and `tracestate` for the next message; a trace that is not sampled says so there."""
        return context.inject(self._span.get_span_context())

    def set(self, **attributes: Value) -> None:
        """Names without a dot are pdq's own: `set(attempt=2)` sets `pdq.attempt`."""
        if self._span.is_recording():
            self._span.set_attributes(own(attributes))

    def set_sampling(self, sampling: Sampling) -> None:
        self.set(
            **{
                "gen_ai.request.seed": sampling.seed,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
            }
        )

    def set_usage(self, usage: Usage, finish_reason: str, kv: KvReport | None = None) -> None:
        attributes: dict[str, Value] = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.response.finish_reasons": (finish_reason,),
        }
        if kv is not None:
            attributes["pdq.kv.promised_tokens"] = kv.promised_tokens
            attributes["pdq.kv.loaded_tokens"] = kv.loaded_tokens
            if kv.cause:
                attributes["pdq.kv.cause"] = kv.cause
        self.set(**attributes)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        if self._span.is_recording():
            self._span.add_event(name, own(attributes or {}))

    def fail(self, code: str, message: str = "") -> None:
        """Mark as failed, with a stable code and a message that holds nothing of the prompt."""
        self._failed = True
        if self._span.is_recording():
            self._span.set_attribute("error.type", code)
            self._span.set_status(StatusCode.ERROR, message[:MAX_TEXT] or code)

    def end(self, outcome: str = "ok", at_s: float | None = None) -> None:
        """End now, or as of a Unix time; the first call counts. `outcome` becomes `pdq.outcome`, unless the
        span has failed."""
        if self._span.is_recording():
            self._span.set_attribute("pdq.outcome", "failed" if self._failed else outcome)
            self._span.end(None if at_s is None else int(at_s * 1e9))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit | KeyboardInterrupt):
            self.end("cancelled")
        elif isinstance(error, Interrupted):
            self.end(error.cause)
        else:
            if error is not None and not self._failed:
                self.fail(error.code if isinstance(error, PdqError) else type(error).__name__)
            self.end()


class StageSpan(Span):
    """The span of one job at one stage: `route`, `process prefill` or `process decode`."""

    def __init__(
        self,
        tracer: trace.Tracer,
        span: trace.Span,
        queue_wait_s: float,
        ended: Callable[[ReadableSpan], None] | None = None,
    ) -> None:
        """ended: takes the children, which are over when they are made. Without it there are none."""
        super().__init__(tracer, span)
        self._ended = ended
        self.queue_wait_s = queue_wait_s
        """Seconds from the broker's stored time to the delivery; 0 when either is unknown or clocks differ."""

    def phase(self, phase: PhaseLike) -> None:
        """A child with the phase's own times, attributes and events."""
        self.child(phase.name, phase.start_ns, phase.end_ns, phase.attributes, phase.events)

    def child(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value] | None = None,
        events: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """A child that is over already. Times are Unix nanoseconds; an end before its start counts as the start."""
        # Made whole: a span of the SDK that is begun, filled and ended costs several times as much.
        if self._ended is None or not isinstance(self._span, ReadableSpan) or not self._span.is_recording():
            return
        parent = self._span.get_span_context()
        child = trace.SpanContext(parent.trace_id, getrandbits(64), False, parent.trace_flags, parent.trace_state)
        self._ended(
            ReadableSpan(
                name,
                child,
                parent,
                self._span.resource,
                {name: _cut(value) for name, value in own(attributes or {}).items()},
                [Event(event, timestamp=at_ns) for event, at_ns in events],
                start_time=start_ns,
                end_time=max(start_ns, end_ns),
                instrumentation_scope=self._span.instrumentation_scope,
            )
        )


def _cut(value: Value) -> Value:
    return value[:MAX_ATTRIBUTE] if isinstance(value, str) else value
