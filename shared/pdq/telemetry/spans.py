"""Spans of a request's trace: what a client, a router and a worker say they did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from opentelemetry import trace

from pdq.errors import Interrupted, PdqError
from pdq.messages import KvReport, Sampling, Usage
from pdq.otlp import Value
from pdq.telemetry import context
from pdq.telemetry.record import Record, context_under, own

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


class Span:
    """One span, never made current. A span that is not sampled takes every call and does nothing.

    As a context manager it ends with the block: `ok`, or the cause of an `Interrupted` (`cancelled` for a
    cancelled task or a closed generator), or `failed` with the error's code. The error's text is not
    recorded, as it may quote a prompt; whoever knows a safe message calls `fail`.
    """

    def __init__(self, span: trace.SpanContext, record: Record | None = None) -> None:
        """record: None where the span is not sampled, or there is no trace at all."""
        self._context = span
        self._record = record
        self._failed = False
        self._headers: dict[str, str] | None = None

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty when there is no trace at all."""
        return trace.format_trace_id(self._context.trace_id) if self._context.is_valid else ""

    @property
    def traceparent(self) -> str:
        return self.headers().get("traceparent", "")

    def headers(self) -> dict[str, str]:
        """`traceparent` and `tracestate` for the next message; a trace that is not sampled says so there."""
        if self._headers is None:
            self._headers = context.inject(self._context)
        return dict(self._headers)

    def set(self, **attributes: Value) -> None:
        """Names without a dot are pdq's own: `set(attempt=2)` sets `pdq.attempt`."""
        if self._record is not None:
            self._record.set(attributes)

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
        if self._record is not None:
            self._record.event(name, time.time_ns(), attributes)

    def fail(self, code: str, message: str = "") -> None:
        """Mark as failed, with a stable code and a message that holds nothing of the prompt."""
        self._failed = True
        if self._record is not None:
            self._record.set({"error.type": code})
            self._record.fail(message[:MAX_TEXT] or code)

    def end(self, outcome: str = "ok", at_s: float | None = None) -> None:
        """End now, or as of a Unix time; the first call counts. `outcome` becomes `pdq.outcome`, unless the
        span has failed."""
        record, self._record = self._record, None
        if record is not None:
            record.attributes["pdq.outcome"] = "failed" if self._failed else outcome
            record.end(time.time_ns() if at_s is None else int(at_s * 1e9))

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

    def __init__(self, span: trace.SpanContext, queue_wait_s: float, record: Record | None = None) -> None:
        super().__init__(span, record)
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
        if self._record is None:
            return
        known = own(attributes) if attributes else {}
        child = Record(self._record.sink, name, context_under(self._context), self._context, start_ns, known)
        for event, at_ns in events:
            child.event(event, at_ns)
        child.end(end_ns)
