"""Traces read back from real and from damaged files, and the waterfall they make."""

from __future__ import annotations

import io
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from pdq import otlp, traces
from pdq.engines.base import Phase
from pdq.settings import TelemetrySettings
from pdq.telemetry import Telemetry
from rich.console import Console

T0 = 1_700_000_000_000_000_000
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OTHER = "0" * 31 + "1"


def span(
    name: str, span_id: str, parent: str, start_ms: float, end_ms: float, *, trace: str = TRACE, **more: Any
) -> otlp.WireSpan:
    attributes = more.pop("attributes", {})
    return otlp.WireSpan(
        trace_id=trace,
        span_id=span_id * 16,
        parent_span_id=parent * 16,
        name=name,
        start_time_unix_nano=str(T0 + int(start_ms * 1e6)),
        end_time_unix_nano=str(T0 + int(end_ms * 1e6)),
        attributes=otlp.attributes(attributes),
        **more,
    )


def line(service: str, *spans: otlp.WireSpan) -> bytes:
    resource = otlp.Resource(attributes=otlp.attributes({"service.name": f"pdq-{service}"}))
    scopes = (otlp.ScopeSpans(spans=spans),)
    return otlp.encode(otlp.ExportRequest(resource_spans=(otlp.ResourceSpans(resource=resource, scope_spans=scopes),)))


def first_token(at_ms: float) -> tuple[otlp.SpanEvent, ...]:
    return (otlp.SpanEvent(time_unix_nano=str(T0 + int(at_ms * 1e6)), name="first_token"),)


CLIENT = line(
    "client",
    span("submit", "8", "", 0, 1, trace=OTHER, attributes={"pdq.request.id": "r-2"}),
    span("submit", "a", "", 0, 100, attributes={"pdq.request.id": "r-1"}),
)
ROUTER = line("router", span("route", "b", "a", 2, 6, attributes={"pdq.request.id": "r-1", "pdq.attempt": 1}))
PREFILL = line(
    "prefill",
    span("queue", "d", "c", 6, 20),
    span("kv.store", "e", "c", 40, 48),
    span("process prefill", "c", "b", 20, 50, attributes={"pdq.attempt": 1}),
)
DECODE = line(
    "decode",
    span("queue", "2", "1", 50, 52),
    span("engine.decode", "3", "1", 54, 98, events=first_token(60)),
    span(
        "process decode",
        "1",
        "c",
        52,
        99,
        attributes={
            "pdq.attempt": 1,
            "gen_ai.usage.input_tokens": 33,
            "gen_ai.usage.output_tokens": 20,
            "pdq.kv.promised_tokens": 32,
            "pdq.kv.loaded_tokens": 32,
        },
    ),
)
LINES = (CLIENT, ROUTER, PREFILL, DECODE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """One file a service; another request's spans stand in lines of their own, and in those of `r-1`."""
    other = span("route", "9", "", 0, 1, trace=OTHER, attributes={"pdq.request.id": "r-2"})
    noise = line("router", other)
    for number, each in enumerate(LINES):
        (tmp_path / f"service{number}.jsonl").write_bytes(b"\n".join((noise, each, noise)) + b"\n")
    return tmp_path


def one(directory: Path, wanted: str) -> traces.Trace:
    found = traces.find(directory, wanted)
    assert len(found) == 1
    return found[0]


def shape(trace: traces.Trace) -> list[str]:
    return [f"{'  ' * depth}{span.service} {span.name}" for depth, span, _ in trace.walk()]


WHOLE = [
    "client submit",
    "  router route",
    "    prefill process prefill",
    "      prefill queue",
    "      prefill kv.store",
    "      decode process decode",
    "        decode queue",
    "        decode engine.decode",
]


@pytest.mark.parametrize("wanted", ["r-1", TRACE])
def test_a_trace_is_found_by_its_request_and_by_its_id(directory: Path, wanted: str) -> None:
    trace = one(directory, wanted)
    assert trace.trace_id == TRACE
    assert shape(trace) == WHOLE
    assert trace.ttft_ms() == 60.0


@pytest.mark.parametrize("wanted", ["r-3", "r", "r-", "", "f" * 32, '"', "r-1\n", "*"])
def test_what_is_not_there_is_not_found(directory: Path, wanted: str) -> None:
    assert traces.find(directory, wanted) == []


def test_a_directory_that_is_missing_or_empty_holds_no_trace(tmp_path: Path) -> None:
    assert traces.find(tmp_path, "r-1") == []
    assert traces.find(tmp_path / "missing", "r-1") == []


def test_a_request_seen_in_two_traces_gives_both_newest_first(directory: Path) -> None:
    newer = "0" * 31 + "2"
    again = span("submit", "7", "", 5000, 6000, trace=newer, attributes={"pdq.request.id": "r-1"})
    (directory / "later.jsonl").write_bytes(line("client", again) + b"\n")
    assert [trace.trace_id for trace in traces.find(directory, "r-1")] == [newer, TRACE]


@pytest.mark.parametrize("cut", [1, 10, 200, len(DECODE) - 1])
def test_a_half_written_last_line_hides_only_its_own_spans(directory: Path, cut: int) -> None:
    (directory / "service3.jsonl").write_bytes(DECODE[:cut])
    assert shape(one(directory, "r-1")) == WHOLE[:5]
    (directory / "service3.jsonl").write_bytes(DECODE)
    assert shape(one(directory, "r-1")) == WHOLE


def test_damaged_lines_are_passed_over(directory: Path) -> None:
    chance = random.Random(1)
    good = b"\n".join(LINES)
    bad = [b"", b"null", b"[]", b'"r-1"', b'{"resourceSpans":3} "r-1"', TRACE.encode(), b"\xff\xfe" + TRACE.encode()]
    bad += [PREFILL.replace(b'"name":"queue"', b'"name":7'), PREFILL.replace(b'TimeUnixNano":"1', b'TimeUnixNano":"x')]
    bad += [bytes(chance.randrange(256) for _ in range(200)) + TRACE.encode() for _ in range(50)]
    bad += [b"[" * 100_000 + TRACE.encode(), b'{"a":' * 100_000 + TRACE.encode()]
    (directory / "damaged.jsonl").write_bytes(b"\n".join([*bad, good, *bad]))
    for number in range(4):
        (directory / f"service{number}.jsonl").unlink()
    assert shape(one(directory, "r-1")) == WHOLE


def test_a_line_without_end_is_skipped_in_bounded_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_LINE", 4096)
    endless = b"\n".join((CLIENT, b" " * 50_000 + ROUTER, b" " * 4095 + b"\n" + PREFILL, b"x" * 4096, DECODE))
    (directory / "a.jsonl").write_bytes(endless)
    for number in range(4):
        (directory / f"service{number}.jsonl").unlink()
    # ROUTER stands on a line too long, so what is below it has lost its parent.
    assert shape(one(directory, "r-1")) == ["client submit", *(name[4:] for name in WHOLE[2:])]


def test_spans_are_bounded_and_counted_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "copy.jsonl").write_bytes(b"\n".join(LINES))
    assert len(one(directory, "r-1").spans) == 8
    monkeypatch.setattr(traces, "MAX_SPANS", 5)
    assert len(one(directory, "r-1").spans) <= 5


def test_a_circle_of_parents_ends(directory: Path) -> None:
    circle = [span("x", "5", "6", 0, 1), span("y", "6", "5", 0, 1)]
    (directory / "circle.jsonl").write_bytes(line("odd", *circle, span("z", "7", "7", 0, 1)))
    assert sorted(shape(one(directory, TRACE))) == sorted([*WHOLE, "odd z"])
    for number in range(4):
        (directory / f"service{number}.jsonl").unlink()
    (directory / "circle.jsonl").write_bytes(line("odd", *circle))
    assert len(drawn(one(directory, TRACE))) == 3


def test_what_telemetry_writes_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    services = {
        name: Telemetry.start(name, TelemetrySettings(file=str(tmp_path / f"{name}.jsonl")), f"{name}-1")
        for name in ("client", "decode")
    }
    with services["client"].submit("r-1", "acme", "tiny") as submit:
        stored_ns = time.time_ns() - 1000
        with services["decode"].process(
            "decode", "PDQ_DECODE", submit.headers(), request="r-1", worker="w", stored_ns=stored_ns, attempt=1
        ) as decode:
            now = time.time_ns()
            attributes: dict[str, Any] = {"kv.loaded": True, "ratio": 0.5, "words": 3}
            decode.phase(
                Phase(name="engine.decode", start_ns=now, end_ns=now + 9, attributes=attributes, events=(("x", now),))
            )
            decode.fail("stalled", "no progress")
    for telemetry in services.values():
        telemetry.close()

    trace = one(tmp_path, "r-1")
    assert trace.trace_id == submit.trace_id
    spans = {found.name: found for found in trace.spans}
    assert {"submit", "process decode", "queue", "engine.decode"} == set(spans)
    assert spans["engine.decode"].attributes == {"kv.loaded": True, "pdq.ratio": 0.5, "pdq.words": 3}
    assert spans["engine.decode"].events == [("x", now)]
    assert spans["process decode"].error == "no progress"
    assert spans["process decode"].links == [spans["submit"].span_id]
    assert [root.name for root in trace.roots] == ["submit"]


# The waterfall.


def drawn(trace: traces.Trace, width: int = 100, **console: Any) -> list[str]:
    out = io.StringIO()
    traces.render(trace, Console(file=out, width=width, **console))
    return out.getvalue().splitlines()


def test_the_waterfall_in_plain_text(directory: Path) -> None:
    assert drawn(one(directory, "r-1")) == [
        f"trace {TRACE}",
        "8 spans, total 100.0 ms, first token after 60.0 ms, 33 + 20 tokens, KV of 32/32 tokens loaded",
        "span                  service  start ms   took ms",
        "submit                client        0.0     100.0 |===============================================|",
        "  route               router        2.0       4.0 |===                                            |",
        "    process prefill   prefill      20.0      30.0 |         ===============                       |",
        "      queue           prefill       6.0      14.0 |  ........                                     |",
        "      kv.store        prefill      40.0       8.0 |                  =====                        |",
        "      process decode  decode       52.0      47.0 |                        =======================|",
        "        queue         decode       50.0       2.0 |                       ..                      |",
        "        engine.decode decode       54.0      44.0 |                         ===*==================|",
    ]


def test_attempts_are_numbered_and_errors_named(directory: Path) -> None:
    failed = span(
        "process decode",
        "4",
        "c",
        50,
        51,
        attributes={"pdq.attempt": 1, "error.type": "stalled"},
        status=otlp.SpanStatus(message="no progress", code=2),
    )
    second = DECODE.replace(b'"pdq.attempt","value":{"intValue":"1"}', b'"pdq.attempt","value":{"intValue":"2"}')
    (directory / "service3.jsonl").write_bytes(second + b"\n" + line("decode", failed))
    lines = drawn(one(directory, "r-1"), width=120)
    attempts = [each for each in lines if "process decode" in each]
    assert [each.split("decode")[1].split()[0] for each in attempts] == ["#1", "#2"]
    assert attempts[0].endswith("| ! no progress") and "!" not in attempts[1]
    assert "process prefill #" not in "\n".join(lines)


def test_a_terminal_gets_colour_and_lines(directory: Path) -> None:
    failed = line("decode", span("process decode", "4", "c", 50, 51, status=otlp.SpanStatus(code=2)))
    (directory / "failed.jsonl").write_bytes(failed)
    fancy = "\n".join(drawn(one(directory, "r-1"), force_terminal=True, color_system="standard", no_color=False))
    assert "━" in fancy and "┄" in fancy and "◆" in fancy
    assert "\x1b[1;31m" in fancy
    plain = "\n".join(drawn(one(directory, "r-1"), force_terminal=True, no_color=True))
    assert plain.isascii() and "\x1b" not in plain


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_it_fits_the_width_it_has(directory: Path, width: int) -> None:
    rows = drawn(one(directory, "r-1"), width=width)[3:]
    assert len(rows) == 8
    assert len({len(row) for row in rows}) == 1
    if width >= 80:
        assert len(rows[0]) <= width


def test_nothing_from_a_file_controls_the_terminal(tmp_path: Path) -> None:
    odd = span("sub\x1b[2Jmit\n", "a", "", 0, 1, status=otlp.SpanStatus(message="\x1b]0;x\x07\rbad", code=2))
    (tmp_path / "x.jsonl").write_bytes(line("cli\x1bent", odd))
    for options in ({}, {"force_terminal": True, "no_color": True}):
        text = "".join(drawn(one(tmp_path, TRACE), **options))
        assert text.isprintable(), text


def test_a_trace_of_no_length_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(line("client", span("submit", "a", "", 0, 0)))
    assert drawn(one(tmp_path, TRACE))[3].startswith("submit")


def test_json_holds_the_tree_and_the_totals(directory: Path) -> None:
    found = json.loads(json.dumps(traces.to_json(one(directory, "r-1"))))
    assert (found["trace_id"], found["total_ms"], found["ttft_ms"], found["spans"]) == (TRACE, 100.0, 60.0, 8)
    submit = found["roots"][0]
    assert (submit["name"], submit["service"], submit["start_ns"]) == ("submit", "client", T0)
    assert submit["children"][0]["children"][0]["children"][0]["name"] == "queue"
