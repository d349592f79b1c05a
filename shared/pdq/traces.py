"""Traces read back from OTLP JSON, whether from files or from a Jaeger, and shown as a waterfall in the terminal.

Files are scanned line by line in bounded memory: only lines that name the trace are decoded, and a line
that is not whole (its writer was killed, or is still writing) is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from pdq import otlp
from pdq.errors import NotDecodable

MAX_LINE = 16 << 20
"""Bytes of a line; a longer one is not an export of ours, and is skipped."""
MAX_SPANS = 20_000
"""Spans of one answer; whatever is beyond is left out."""

WAITS = frozenset({"queue", "cold start"})
"""Spans of waiting, in which nothing was done for the request."""
NUMBER = 9
"""Width of a column of numbers."""
COLOURS = ("cyan", "green", "magenta", "blue", "yellow")
"""Of the services, in turn."""

_TRACE_ID = re.compile(r"[0-9a-f]{32}\Z")


def is_trace_id(text: str) -> bool:
    """Whether `text` has the form of a trace id (a request may have such a name too)."""
    return _TRACE_ID.match(text) is not None


class TraceSpan(msgspec.Struct, kw_only=True):
    """One span, with the spans below it in the order they began. Times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, otlp.Value] = {}
    events: list[tuple[str, int]] = []
    links: list[str] = []
    """Span ids."""
    error: str = ""
    """What a failed span says of its failure."""
    children: list[TraceSpan] = []


class Trace(msgspec.Struct, kw_only=True):
    """The spans of one trace. `roots` are those whose parents are not here: one, when all have arrived."""

    trace_id: str
    spans: list[TraceSpan]
    roots: list[TraceSpan]

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans)

    def walk(self) -> Iterator[tuple[int, TraceSpan, list[TraceSpan]]]:
        """Every span with its depth and its siblings (itself among them), parents first."""
        waiting = [(0, root, self.roots) for root in reversed(self.roots)]
        while waiting:
            depth, span, siblings = waiting.pop()
            yield depth, span, siblings
            waiting.extend((depth + 1, child, span.children) for child in reversed(span.children))

    def ttft_ms(self) -> float | None:
        """From the beginning of the trace to the first token, if one was generated."""
        times = [
            at_ns
            for span in self.spans
            if span.name == "engine.decode"
            for name, at_ns in span.events
            if name == "first_token"
        ]
        return (min(times) - self.start_ns) / 1e6 if times else None


def find(directory: Path, wanted: str) -> list[Trace]:
    """The traces of a request id, or the one of a trace id, newest first, from the directory's `*.jsonl`."""
    ids = _trace_ids(directory, wanted)
    found = (span for span in _spans(directory, [each.encode() for each in ids]) if span.trace_id in ids)
    return of_spans(found)


def of_export(request: otlp.ExportRequest) -> list[Trace]:
    """The traces of an export request, newest first. Raises ValueError when a span's numbers are none."""
    return of_spans(span for resource in request.resource_spans for span in _of_resource(resource))


def of_spans(found: Iterable[TraceSpan]) -> list[Trace]:
    """Spans as trees, newest trace first; a span that comes twice counts once."""
    by_trace: dict[str, dict[str, TraceSpan]] = {}
    for span in islice(found, MAX_SPANS):
        by_trace.setdefault(span.trace_id, {})[span.span_id] = span
    traces = [_tree(trace_id, list(spans.values())) for trace_id, spans in by_trace.items()]
    return sorted(traces, key=lambda trace: trace.start_ns, reverse=True)


def _trace_ids(directory: Path, wanted: str) -> set[str]:
    ids = {wanted} if is_trace_id(wanted) else set()
    spans = _spans(directory, [msgspec.json.encode(wanted)])
    return ids | {span.trace_id for span in spans if span.attributes.get("pdq.request.id") == wanted}


def _spans(directory: Path, markers: list[bytes]) -> Iterator[TraceSpan]:
    """Spans of the lines that hold one of the markers."""
    for path in sorted(directory.glob("*.jsonl")):
        for line in _lines(path):
            if any(marker in line for marker in markers):
                yield from _decode(line)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            whole = True
            while line := file.readline(MAX_LINE):
                ended = line.endswith(b"\n")
                if whole and (ended or len(line) < MAX_LINE):
                    yield line
                whole = ended
    except FileNotFoundError:
        return


def _decode(line: bytes) -> list[TraceSpan]:
    try:
        request = otlp.decode(line)
        return [span for resource in request.resource_spans for span in _of_resource(resource)]
    except (NotDecodable, ValueError):
        return []


def _of_resource(resource: otlp.ResourceSpans) -> Iterator[TraceSpan]:
    name = str(otlp.plain(resource.resource.attributes).get("service.name", "?"))
    for scope in resource.scope_spans:
        yield from (_span(wire, name.removeprefix("pdq-")) for wire in scope.spans)


def _span(wire: otlp.WireSpan, service: str) -> TraceSpan:
    attributes = otlp.plain(wire.attributes)
    failed = wire.status.code == otlp.STATUS_ERROR
    return TraceSpan(
        trace_id=wire.trace_id,
        span_id=wire.span_id,
        parent_id=wire.parent_span_id,
        name=wire.name,
        service=service,
        start_ns=int(wire.start_time_unix_nano),
        end_ns=int(wire.end_time_unix_nano),
        attributes=attributes,
        events=[(event.name, int(event.time_unix_nano)) for event in wire.events],
        links=[link.span_id for link in wire.links],
        error=(wire.status.message or str(attributes.get("error.type", "failed"))) if failed else "",
        children=[],
    )


def _tree(trace_id: str, spans: list[TraceSpan]) -> Trace:
    spans.sort(key=lambda span: (span.start_ns, span.end_ns))
    by_id = {span.span_id: span for span in spans}
    roots: list[TraceSpan] = []
    for span in spans:
        parent = by_id.get(span.parent_id)
        (roots if parent is None or parent is span else parent.children).append(span)
    return Trace(trace_id=trace_id, spans=spans, roots=roots)


def to_json(trace: Trace) -> dict[str, Any]:
    """The trace as a tree of plain JSON values, with the same totals as the waterfall."""
    return {
        "trace_id": trace.trace_id,
        "total_ms": (trace.end_ns - trace.start_ns) / 1e6,
        "ttft_ms": trace.ttft_ms(),
        "spans": len(trace.spans),
        "roots": msgspec.to_builtins(trace.roots),
    }


def render(trace: Trace, console: Console) -> None:
    """Print the waterfall: a line per span, waits dotted, errors red; plain ASCII where not on a terminal."""
    Waterfall(trace, console).print()


class Waterfall:
    """Lays one trace out over the width of a console."""

    def __init__(self, trace: Trace, console: Console) -> None:
        self._trace = trace
        self._console = console
        self._fancy = console.is_terminal and not console.no_color and console.encoding.startswith("utf")
        self._rows = [(f"{'  ' * depth}{_label(span, near)}", span) for depth, span, near in trace.walk()]
        self._services = sorted({span.service for span in trace.spans})
        self._label_width = min(
            max((len(label) for label, _ in self._rows), default=0), max(20, console.width // 2 - 8)
        )
        self._service_width = min(max(map(len, self._services)), 12)
        fixed = self._label_width + self._service_width + 2 * NUMBER + 5
        self._bar_width = max(8, console.width - fixed - 2)

    def print(self) -> None:
        self._line(Text(f"trace {_printable(self._trace.trace_id)}"))
        self._line(Text(_printable(_totals(self._trace))))
        columns = f"{'span':{self._label_width}} {'service':{self._service_width}}"
        self._line(Text(f"{columns} {'start ms':>{NUMBER}} {'took ms':>{NUMBER}}", "dim"))
        for label, span in self._rows:
            self._line(self._row(label, span))

    def _line(self, text: Text) -> None:
        # Soft wrap: what is longer than the width (an error's message) is not cut.
        self._console.print(text if self._fancy else text.plain, soft_wrap=True, markup=False, highlight=False)

    def _row(self, label: str, span: TraceSpan) -> Text:
        start_ms, took_ms = (span.start_ns - self._trace.start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        failed = "bold red" if span.error else ""
        style = failed or COLOURS[self._services.index(span.service) % len(COLOURS)]
        service = _printable(span.service)[: self._service_width]
        row = Text(f"{label[: self._label_width]:{self._label_width}}", failed)
        row.append(f" {service:{self._service_width}}", style)
        row.append(f" {start_ms:{NUMBER}.1f} {took_ms:{NUMBER}.1f} ")
        row.append(self._bar(span), style)
        row.append(f" ! {_printable(span.error)}" if span.error else "", failed)
        return row

    def _bar(self, span: TraceSpan) -> str:
        """The span's place on the common scale; a diamond (`*`) stands at its first token."""
        work, wait, mark = ("━", "┄", "◆") if self._fancy else ("=", ".", "*")
        first = self._column(span.start_ns)
        last = max(first, self._column(span.end_ns))
        cells = [" "] * first + [wait if span.name in WAITS else work] * (last - first + 1)
        for name, at_ns in span.events:
            if name == "first_token" and span.start_ns <= at_ns <= span.end_ns:
                cells[self._column(at_ns)] = mark
        edge = "│" if self._fancy else "|"
        return f"{edge}{''.join(cells):{self._bar_width}}{edge}"

    def _column(self, at_ns: int) -> int:
        total = max(1, self._trace.end_ns - self._trace.start_ns)
        return min(self._bar_width - 1, max(0, (at_ns - self._trace.start_ns) * self._bar_width // total))


def _label(span: TraceSpan, siblings: list[TraceSpan]) -> str:
    """Its name; with the attempt where there is more than the first."""
    attempts = [other.attributes.get("pdq.attempt", 0) for other in siblings if other.name == span.name]
    attempt = span.attributes.get("pdq.attempt", 0)
    numbered = attempt and (attempt != 1 or len(attempts) > 1)
    return _printable(f"{span.name} #{attempt}" if numbered else span.name)


def _totals(trace: Trace) -> str:
    known: dict[str, otlp.Value] = {}
    for span in trace.spans:
        known.update(span.attributes)
    parts = [f"{len(trace.spans)} spans", f"total {(trace.end_ns - trace.start_ns) / 1e6:.1f} ms"]
    if (ttft := trace.ttft_ms()) is not None:
        parts.append(f"first token after {ttft:.1f} ms")
    if "gen_ai.usage.output_tokens" in known:
        parts.append(f"{known.get('gen_ai.usage.input_tokens', '?')} + {known['gen_ai.usage.output_tokens']} tokens")
    if "pdq.kv.promised_tokens" in known:
        parts.append(f"KV of {known.get('pdq.kv.loaded_tokens', 0)}/{known['pdq.kv.promised_tokens']} tokens loaded")
    return ", ".join(parts)


def _printable(text: str) -> str:
    """Files may come from elsewhere: no control character reaches the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
