"""OTLP JSON: the form in which spans are kept in a file, one export request a line.

It follows the OTLP specification's JSON mapping: ids are hex, 64-bit integers are strings, enumerations
are numbers. Telemetry writes it, `pdq.traces` reads it back; so do collectors and other tools.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pdq.errors import NotDecodable

Value = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
"""An attribute's value, as OpenTelemetry has it."""

STATUS_ERROR = 2


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Base of the structs below; field names are those of OTLP, in its camel case."""


class AnyValue(Wire, frozen=True, kw_only=True):
    """Exactly one field is set."""

    string_value: str | None = None
    bool_value: bool | None = None
    int_value: str | int | None = None
    double_value: float | int | str | None = None
    array_value: ArrayValue | None = None


class ArrayValue(Wire, frozen=True, kw_only=True):
    values: tuple[AnyValue, ...] = ()


class KeyValue(Wire, frozen=True, kw_only=True):
    key: str
    value: AnyValue = AnyValue()


class SpanEvent(Wire, frozen=True, kw_only=True):
    time_unix_nano: str | int = "0"
    name: str = ""
    attributes: tuple[KeyValue, ...] = ()


class SpanLink(Wire, frozen=True, kw_only=True):
    trace_id: str
    span_id: str
    trace_state: str = ""
    flags: int = 0


class SpanStatus(Wire, frozen=True, kw_only=True):
    message: str = ""
    code: int = 0


class WireSpan(Wire, frozen=True, kw_only=True):
    trace_id: str
    span_id: str
    trace_state: str = ""
    parent_span_id: str = ""
    flags: int = 0
    name: str = ""
    kind: int = 0
    start_time_unix_nano: str | int = "0"
    end_time_unix_nano: str | int = "0"
    attributes: tuple[KeyValue, ...] = ()
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    status: SpanStatus = SpanStatus()


class Scope(Wire, frozen=True, kw_only=True):
    name: str = ""
    version: str = ""


class ScopeSpans(Wire, frozen=True, kw_only=True):
    scope: Scope = Scope()
    spans: tuple[WireSpan, ...] = ()


class Resource(Wire, frozen=True, kw_only=True):
    attributes: tuple[KeyValue, ...] = ()


class ResourceSpans(Wire, frozen=True, kw_only=True):
    resource: Resource = Resource()
    scope_spans: tuple[ScopeSpans, ...] = ()


class ExportRequest(Wire, frozen=True, kw_only=True):
    """OTLP's ExportTraceServiceRequest."""

    resource_spans: tuple[ResourceSpans, ...] = ()


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ExportRequest)


def encode(request: ExportRequest) -> bytes:
    """One line, without its line end."""
    return _encoder.encode(request)


def decode(line: bytes) -> ExportRequest:
    """Raises NotDecodable for anything that is not an export request."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise NotDecodable(f"not an OTLP JSON export request: {exc}") from exc


def attributes(values: Mapping[str, Value]) -> tuple[KeyValue, ...]:
    return tuple([KeyValue(key=key, value=_wrap(value)) for key, value in values.items()])


def plain(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    """The inverse of `attributes`; values of kinds that pdq never writes are left out."""
    values = ((pair.key, _unwrap(pair.value)) for pair in pairs)
    return {key: value for key, value in values if value is not None}


def _wrap(value: Value) -> AnyValue:
    # bool is an int, so it comes first.
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=str(value))
    if isinstance(value, float):
        return AnyValue(double_value=value if math.isfinite(value) else _named(value))
    return AnyValue(array_value=ArrayValue(values=tuple([_wrap(item) for item in value])))


def _named(value: float) -> str:
    """JSON has no such numbers; protobuf's mapping writes these names."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _unwrap(value: AnyValue) -> Value | None:
    if value.int_value is not None:
        return int(value.int_value)
    if value.double_value is not None:
        return float(value.double_value)
    if value.array_value is not None:
        return [str(_unwrap(item)) for item in value.array_value.values]
    return value.string_value if value.string_value is not None else value.bool_value
