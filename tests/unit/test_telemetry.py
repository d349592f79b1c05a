"""Spans against a real OTLP receiver and a real file; metrics through their own text."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pdq.engines.base import Phase
from pdq.errors import Interrupted, Misconfigured, Rejected
from pdq.messages import KvReport, Sampling, Usage
from pdq.settings import TelemetrySettings
from pdq.telemetry import Metrics, Span, StageSpan, Telemetry
from prometheus_client.parser import text_string_to_metric_families

from tests import otlp

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=a,other=b"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
MILLISECOND = 1_000_000


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[otlp.Collector]:
    with otlp.collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        # Below its first pause between tries, the exporter tries once.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        yield found


def start(service: str, **settings: Any) -> Telemetry:
    return Telemetry.start(service, TelemetrySettings(**settings), f"{service}-1")


def job(telemetry: Telemetry, stage: str, headers: dict[str, str], **more: Any) -> StageSpan:
    known: dict[str, Any] = {"request": "r-1", "worker": "w-1", "stored_ns": time.time_ns() - 5 * MILLISECOND}
    return telemetry.process(stage, f"PDQ_{stage.upper()}", headers, **(known | more))


def one_request(services: dict[str, Telemetry], request: str = "r-1") -> None:
    """A request through all stages, as the services trace it."""
    with services["client"].submit(request, "acme", "tiny") as submit:
        time.sleep(0.01)
        with job(services["router"], "route", submit.headers(), request=request) as route:
            headers = route.headers()
        with job(services["prefill"], "prefill", headers, request=request, attempt=1) as prefill:
            now = time.time_ns()
            prefill.phase(Phase(name="kv.store", start_ns=now, end_ns=now + 1000, attributes={"kv.bytes": 4096}))
            headers = prefill.headers()
        with job(services["decode"], "decode", headers, request=request, attempt=1) as decode:
            now = time.time_ns()
            events = (("first_token", now + 100), ("last_token", now + 900))
            decode.phase(Phase(name="engine.decode", start_ns=now, end_ns=now + 1000, events=events))
            time.sleep(0.001)


@pytest.fixture
def services(collector: otlp.Collector) -> Iterator[dict[str, Telemetry]]:
    found = {name: start(name) for name in ("client", "router", "prefill", "decode")}
    yield found
    for telemetry in found.values():
        telemetry.close()


def test_one_request_is_one_connected_trace(collector: otlp.Collector, services: dict[str, Telemetry]) -> None:
    one_request(services)
    spans = collector.wait(spans=9)

    assert len(spans) == 9
    otlp.assert_one_trace(spans)
    otlp.assert_services(spans, "client", "router", "prefill", "decode")
    assert otlp.assert_no_orphans(spans).name == "submit"
    otlp.assert_linked(spans)
    otlp.assert_stages_within_root(spans)
    otlp.assert_waits_visible(spans, "route", "process prefill", "process decode")
    chain = {span.name: span for span in spans if span.name != "queue"}
    for child, parent in (
        ("route", "submit"),
        ("process prefill", "route"),
        ("process decode", "process prefill"),
        ("kv.store", "process prefill"),
        ("engine.decode", "process decode"),
    ):
        assert chain[child].parent_id == chain[parent].span_id, child
    assert list(chain["engine.decode"].events) == ["first_token", "last_token"]


def test_a_consumer_span_says_what_was_consumed(collector: otlp.Collector, services: dict[str, Telemetry]) -> None:
    sampling = Sampling(max_tokens=7, seed=42, temperature=0.5)
    usage = Usage(prompt_tokens=33, completion_tokens=5, total_tokens=38)
    span = job(services["decode"], "decode", {}, tenant="acme", model="tiny", message_id="17", deliveries=2)
    span.set(attempt=2)
    span.set_sampling(sampling)
    span.set_usage(usage, "stop", KvReport(promised_tokens=32, loaded_tokens=31))
    span.end()

    found = otlp.named(collector.wait(spans=2), "process decode")[0]
    assert found.kind == otlp.CONSUMER
    assert found.attributes == {
        "messaging.system": "nats",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "PDQ_DECODE",
        "messaging.message.id": "17",
        "messaging.nats.delivery_attempt": 2,
        "pdq.request.id": "r-1",
        "pdq.tenant": "acme",
        "pdq.model": "tiny",
        "pdq.stage": "decode",
        "pdq.worker.id": "w-1",
        "pdq.attempt": 2,
        "pdq.outcome": "ok",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.seed": 42,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 33,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["stop"],
        "pdq.kv.promised_tokens": 32,
        "pdq.kv.loaded_tokens": 31,
    }


# One request must stay one trace, whatever its publisher sent.


@pytest.mark.parametrize("header", ["traceparent", "Traceparent"])
def test_the_callers_trace_is_joined(collector: otlp.Collector, services: dict[str, Telemetry], header: str) -> None:
    span = job(services["router"], "route", {header: SAMPLED["traceparent"], "tracestate": SAMPLED["tracestate"]})
    onward = span.headers()
    span.end()

    spans = collector.wait(spans=2)
    assert otlp.assert_one_trace(spans) == TRACE == span.trace_id
    root = otlp.assert_no_orphans(spans, outside=PARENT)
    assert root.links == [(TRACE, PARENT)]
    assert onward == {"traceparent": f"00-{TRACE}-{root.span_id}-01", "tracestate": SAMPLED["tracestate"]}
    assert span.traceparent == onward["traceparent"]


def test_the_clients_own_caller_is_the_parent_of_submit(
    collector: otlp.Collector, services: dict[str, Telemetry]
) -> None:
    services["client"].submit("r-1", "acme", "tiny", SAMPLED).end()
    assert otlp.assert_no_orphans(collector.wait(spans=1), outside=PARENT).trace_id == TRACE


def test_a_trace_that_is_not_sampled_exports_nothing_and_says_so_onward(
    collector: otlp.Collector, services: dict[str, Telemetry]
) -> None:
    for stage, service in (("route", "router"), ("prefill", "prefill"), ("decode", "decode")):
        with job(services[service], stage, NOT_SAMPLED) as span:
            span.set(attempt=1)
            span.event("seen")
            span.phase(Phase(name="kv.store", start_ns=1, end_ns=2))
            span.fail("internal_error", "lost")
            assert span.headers() == NOT_SAMPLED
            assert span.trace_id == TRACE
            assert span.queue_wait_s > 0
    one_request(services, "positive-control")

    spans = collector.wait(spans=9)
    assert TRACE not in {span.trace_id for span in spans}
    for telemetry in services.values():
        telemetry.close()
    assert len(collector.spans) == 9


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "garbage",
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        "00-" + "é" * 60,
        "x" * 100_000,
    ],
)
def test_a_bad_header_is_ignored(
    collector: otlp.Collector,
    services: dict[str, Telemetry],
    traceparent: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job(services["router"], "route", {"traceparent": traceparent, "tracestate": "=,=\nforged"}).end()
    spans = collector.wait(spans=2)
    root = otlp.assert_no_orphans(spans)
    assert root.name == "route"
    assert root.trace_id != TRACE
    assert root.links == []
    assert caplog.records == []


def test_a_bad_tracestate_is_dropped_without_a_log_line(
    collector: otlp.Collector, services: dict[str, Telemetry], caplog: pytest.LogCaptureFixture
) -> None:
    span = job(services["router"], "route", {"traceparent": SAMPLED["traceparent"], "tracestate": "no pair\nforged"})
    assert list(span.headers()) == ["traceparent"]
    span.end()
    assert caplog.records == []


def test_attempts_are_siblings_with_their_numbers(collector: otlp.Collector, services: dict[str, Telemetry]) -> None:
    with services["client"].submit("r-1", "acme", "tiny") as submit:
        headers = submit.headers()
    for attempt in (1, 2):
        with job(services["prefill"], "prefill", headers, attempt=attempt):
            pass
    spans = collector.wait(spans=5)
    otlp.assert_one_trace(spans)
    attempts = otlp.named(spans, "process prefill")
    assert {span.parent_id for span in attempts} == {otlp.named(spans, "submit")[0].span_id}
    assert sorted(span.attempt for span in attempts) == [1, 2]
    otlp.assert_linked(spans)


def test_deliveries_of_a_message_without_a_trace_are_one_trace(
    collector: otlp.Collector, services: dict[str, Telemetry]
) -> None:
    stored_ns = time.time_ns() - MILLISECOND
    spans = [job(services["router"], "route", {}, stored_ns=stored_ns) for _ in range(2)]
    other = job(services["router"], "route", {}, stored_ns=stored_ns + 1)
    assert spans[0].trace_id == spans[1].trace_id
    assert other.trace_id != spans[0].trace_id
    assert spans[0].traceparent != spans[1].traceparent
    for span in (*spans, other):
        span.end()


# Streams that are aborted leave no noise and no open span.


async def stream(telemetry: Telemetry, request: str, headers: dict[str, str]) -> AsyncIterator[int]:
    with job(telemetry, "decode", headers, request=request) as span:
        for token in range(20):
            await asyncio.sleep(0)
            yield token
            span.event("token", {"n": token})


async def consume(telemetry: Telemetry, request: str, headers: dict[str, str], stop_after: int | None) -> None:
    tokens = stream(telemetry, request, headers)
    count = 0
    async for _ in tokens:
        count += 1
        if count == stop_after:
            # Another task closes it, as a server does when its client leaves.
            await asyncio.create_task(tokens.aclose())  # type: ignore[attr-defined]
            return


async def test_aborted_streams_end_their_spans_in_silence(
    collector: otlp.Collector, services: dict[str, Telemetry], caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(94)
    roots: dict[str, Span] = {}
    async with asyncio.TaskGroup() as group:
        for number in range(100):
            request = f"r-{number}"
            roots[request] = services["client"].submit(request, "acme", "tiny")
            stop_after = chance.randint(1, 19) if number % 2 else None
            group.create_task(consume(services["decode"], request, roots[request].headers(), stop_after))
    cancelled = asyncio.create_task(consume(services["decode"], "r-cancelled", {}, None))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)

    spans = otlp.named(await asyncio.to_thread(collector.wait, spans=202), "process decode")
    assert len(spans) == 101
    assert caplog.records == []
    for span in spans:
        request = span.attributes["pdq.request.id"]
        aborted = request == "r-cancelled" or int(request[2:]) % 2
        assert span.attributes["pdq.outcome"] == ("cancelled" if aborted else "ok"), request
        assert span.status != otlp.ERROR
        if request in roots:
            assert (span.trace_id, span.parent_id) == tuple(roots[request].traceparent.split("-")[1:3]), request
    for root in roots.values():
        root.end()


# Outcomes.


def test_an_error_leaves_its_code_but_not_its_text(collector: otlp.Collector, services: dict[str, Telemetry]) -> None:
    for error in (Rejected("the prompt was: secret", code="too_long"), ValueError("secret")):
        with pytest.raises(type(error)), job(services["decode"], "decode", {}, stored_ns=0):
            raise error
    spans = collector.wait(spans=2)
    assert [span.attributes["error.type"] for span in spans] == ["too_long", "ValueError"]
    assert {span.attributes["pdq.outcome"] for span in spans} == {"failed"}
    assert {span.status for span in spans} == {otlp.ERROR}
    assert "secret" not in repr(spans)


def test_fail_keeps_its_message_and_the_first_outcome(
    collector: otlp.Collector, services: dict[str, Telemetry]
) -> None:
    with job(services["decode"], "decode", {}, stored_ns=0) as span:
        span.fail("store_failed", "no room" + "!" * 1000)
        span.end()
        span.end("cancelled")
        span.set(late=True)
    found = collector.wait(spans=1)[0]
    assert (found.attributes["error.type"], found.attributes["pdq.outcome"]) == ("store_failed", "failed")
    assert found.message.startswith("no room!") and len(found.message) == 256
    assert "pdq.late" not in found.attributes


def test_an_interruption_is_no_error(collector: otlp.Collector, services: dict[str, Telemetry]) -> None:
    with pytest.raises(Interrupted), job(services["decode"], "decode", {}, stored_ns=0):
        raise Interrupted("expired")
    found = collector.wait(spans=1)[0]
    assert (found.attributes["pdq.outcome"], found.status) == ("expired", 0)


def test_clocks_that_differ_make_no_negative_wait(collector: otlp.Collector, services: dict[str, Telemetry]) -> None:
    with job(services["decode"], "decode", {}, stored_ns=time.time_ns() + 3600 * 10**9) as span:
        assert span.queue_wait_s == 0.0
        span.phase(Phase(name="kv.load", start_ns=2000, end_ns=1000))
    spans = {found.name: found for found in collector.wait(spans=2)}
    assert set(spans) == {"process decode", "kv.load"}
    assert (spans["kv.load"].start_ns, spans["kv.load"].end_ns) == (2000, 2000)


# Sampling and settings.


def test_no_destination_makes_no_spans_and_passes_the_context_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    telemetry = start("router")
    with job(telemetry, "route", SAMPLED) as span:
        assert span.headers() == SAMPLED
    with telemetry.submit("r-1", "acme", "tiny") as root:
        assert (root.headers(), root.traceparent, root.trace_id) == ({}, "", "")
    telemetry.close()


def test_opentelemetrys_own_variable_switches_spans_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    telemetry = start("router", file=str(tmp_path / "spans"))
    with job(telemetry, "route", SAMPLED) as span:
        assert span.headers() == SAMPLED
    telemetry.close()
    assert list(tmp_path.iterdir()) == []


def test_no_global_provider_is_set(services: dict[str, Telemetry]) -> None:
    one_request(services)
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert not trace.get_current_span().get_span_context().is_valid


def test_sample_0_records_none_of_its_own_traces(collector: otlp.Collector) -> None:
    telemetry = start("client", sample=0.0)
    with telemetry.submit("r-1", "acme", "tiny") as root:
        assert root.traceparent.endswith("-00")
    telemetry.submit("r-2", "acme", "tiny", SAMPLED).end()
    telemetry.close()
    assert [span.attributes["pdq.request.id"] for span in collector.spans] == ["r-2"]


def test_a_share_is_sampled_by_trace(collector: otlp.Collector) -> None:
    telemetry = start("client", sample=0.3)
    spans = [telemetry.submit(f"r-{n}", "acme", "tiny") for n in range(400)]
    share = sum(span.traceparent.endswith("-01") for span in spans) / len(spans)
    assert 0.15 < share < 0.45
    for span in spans:
        span.end()
    telemetry.close()
    assert len(collector.spans) == round(share * len(spans))


@pytest.mark.parametrize("sample", [-0.1, 1.1, float("nan")])
def test_a_bad_share_is_named(sample: float) -> None:
    with pytest.raises(Misconfigured, match="PDQ_TRACE_SAMPLE"):
        start("client", sample=sample)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="PDQ_TRACE_FILE"):
        start("client", file=str(tmp_path / "missing" / "x.jsonl"))


def test_a_bad_variable_of_opentelemetry_is_named(collector: otlp.Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(Misconfigured, match="OTEL_EXPORTER_OTLP"):
        start("client")


# A collector that is down.


def test_a_failing_collector_is_one_line_and_its_recovery_another(
    collector: otlp.Collector, services: dict[str, Telemetry], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    collector.answer = 503
    telemetry = services["client"]
    for number in range(1, 5):
        telemetry.submit("r-1", "acme", "tiny").end()
        collector.wait(requests=number)
    collector.answer = 200
    telemetry.submit("r-2", "acme", "tiny").end()
    collector.wait(spans=1)
    telemetry.close()
    lines = [(record.name, record.levelname) for record in caplog.records]
    assert lines == [("pdq.telemetry.export", "WARNING"), ("pdq.telemetry.export", "INFO")]


def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with otlp.collector() as hanging:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", hanging.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        file = tmp_path / "client.jsonl"
        telemetry = start("client", file=str(file))
        with hanging.arrived:  # nobody is answered while this is held
            for number in range(3000):
                telemetry.submit(f"r-{number}", "acme", "tiny").end()
                if number % 500 == 499:
                    wait_for_submits(file, number + 1)
            closing = threading.Thread(target=telemetry.close, args=(0.3,), daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()
        # More than the queue holds was dropped for the collector: without a line for each, and not for the file.
        wait_for_submits(file, 3000)
        assert len(caplog.records) <= 1


def wait_for_submits(file: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while (found := file.read_bytes().count(b'"name":"submit"')) < count:
        assert time.monotonic() < deadline, f"{found} of {count} spans in the file"
        time.sleep(0.01)


# The file.


def read_back(path: Path) -> list[otlp.Received]:
    """Each line through protobuf's own JSON mapping, once its ids are base64 as that mapping wants."""

    def as_protobuf(value: Any) -> Any:
        if isinstance(value, list):
            return [as_protobuf(item) for item in value]
        if not isinstance(value, dict):
            return value
        ids = {"traceId", "spanId", "parentSpanId"}
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode() if key in ids else as_protobuf(item)
            for key, item in value.items()
        }

    spans = []
    for line in path.read_text().splitlines():
        request = json_format.ParseDict(as_protobuf(json.loads(line)), ExportTraceServiceRequest())
        spans += otlp.parse(request.SerializeToString())
    return spans


def test_the_file_holds_what_the_collector_gets(collector: otlp.Collector, tmp_path: Path) -> None:
    names = ("client", "router", "prefill", "decode")
    services = {name: start(name, file=str(tmp_path / "spans.jsonl")) for name in names}
    one_request(services)
    with job(services["decode"], "decode", SAMPLED) as span:
        big: dict[str, Any] = {"flag": True, "big": 2**62, "ratio": 0.25, "odd": float("nan"), "words": ("a", "ü\n")}
        span.set(**big)
        span.fail("internal_error", "no room")
    for telemetry in services.values():
        telemetry.close()

    def order(span: otlp.Received) -> str:
        return span.span_id

    written, received = sorted(read_back(tmp_path / "spans.jsonl"), key=order), sorted(collector.spans, key=order)
    assert len(written) == 11
    assert repr(written) == repr(received)


def test_the_file_follows_otlps_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    telemetry = start("decode", file=str(tmp_path / "decode.jsonl"))
    with job(telemetry, "decode", SAMPLED, stored_ns=0, attempt=3):
        pass
    telemetry.close()
    resource = json.loads((tmp_path / "decode.jsonl").read_text())["resourceSpans"][0]
    about = {pair["key"]: pair["value"] for pair in resource["resource"]["attributes"]}
    assert about["service.name"] == {"stringValue": "pdq-decode"}
    assert about["service.instance.id"] == {"stringValue": "decode-1"}
    span = resource["scopeSpans"][0]["spans"][0]
    assert (span["traceId"], span["parentSpanId"], span["kind"]) == (TRACE, PARENT, 5)
    assert span["traceState"] == SAMPLED["tracestate"]
    assert span["flags"] == 0x301
    assert isinstance(span["startTimeUnixNano"], str)
    assert {"key": "pdq.attempt", "value": {"intValue": "3"}} in span["attributes"]
    assert (tmp_path / "decode.jsonl").stat().st_mode & 0o077 == 0


def test_a_span_is_in_the_file_soon_after_its_end(tmp_path: Path) -> None:
    telemetry = start("client", file=str(tmp_path / "client.jsonl"))
    telemetry.submit("r-1", "acme", "tiny").end()
    deadline = time.monotonic() + 20
    while not (tmp_path / "client.jsonl").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [span.name for span in read_back(tmp_path / "client.jsonl")] == ["submit"]
    telemetry.close()


def test_several_writers_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    writers = [start(f"s{n}", file=str(file)) for n in range(4)]

    def write(telemetry: Telemetry) -> None:
        for number in range(500):
            telemetry.submit(f"r-{number}", "acme", "tiny").end()
        telemetry.close()

    threads = [threading.Thread(target=write, args=(telemetry,)) for telemetry in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(read_back(file)) == 2000


def test_a_file_that_goes_away_costs_spans_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "traces"
    directory.mkdir()
    telemetry = start("client", file=str(directory / "client.jsonl"))
    directory.rename(tmp_path / "moved")
    for _ in range(3):
        telemetry.submit("r-1", "acme", "tiny").end()
        time.sleep(0.15)
    telemetry.close()
    assert [record.name for record in caplog.records] == ["pdq.telemetry.export"]


# Metrics.


def series(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels, as a scraper reads it."""
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def of(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[f"{name}{sorted(labels.items())}"]


def test_metrics_count_what_they_are_told() -> None:
    metrics = Metrics(["tiny"])
    metrics.ended("tiny", "prefill-first", "finished")
    metrics.ended("tiny", "", "failed")
    metrics.routed("decode-only", "short_prompt")
    metrics.redelivered("prefill")
    metrics.dead_letter("decode", "too_many_attempts")
    metrics.kv(192, 160)
    metrics.kv(8, 8)
    metrics.stage("decode", 0.5)
    metrics.phase(Phase(name="kv.store", start_ns=0, end_ns=3 * MILLISECOND))
    metrics.queue_wait("prefill", 0.002)
    metrics.ttft(0.07)
    metrics.tpot(0.002)
    metrics.slots(3, 8)
    metrics.worker("decode", "tiny", "sim 1")
    metrics.engine({"running": 2, "usage": 0.5, "name": "sim", "nothing": None})

    assert of(metrics, "pdq_requests_total", model="tiny", order="prefill-first", outcome="finished") == 1
    assert of(metrics, "pdq_requests_total", model="tiny", order="none", outcome="failed") == 1
    assert of(metrics, "pdq_route_decisions_total", order="decode-only", reason="short_prompt") == 1
    assert of(metrics, "pdq_redeliveries_total", stage="prefill") == 1
    assert of(metrics, "pdq_dead_letters_total", stage="decode", reason="too_many_attempts") == 1
    assert of(metrics, "pdq_kv_promised_tokens_total") == 200
    assert of(metrics, "pdq_kv_loaded_tokens_total") == 168
    assert of(metrics, "pdq_stage_duration_seconds_sum", stage="decode") == 0.5
    assert of(metrics, "pdq_stage_duration_seconds_bucket", stage="kv_store", le="0.0025") == 0
    assert of(metrics, "pdq_stage_duration_seconds_bucket", stage="kv_store", le="0.005") == 1
    assert of(metrics, "pdq_queue_wait_seconds_bucket", stage="prefill", le="0.0025") == 1
    assert of(metrics, "pdq_ttft_seconds_count") == 1
    assert of(metrics, "pdq_tpot_seconds_count") == 1
    assert (of(metrics, "pdq_worker_busy_slots"), of(metrics, "pdq_worker_slots")) == (3, 8)
    assert of(metrics, "pdq_engine_stat", stat="running") == 2
    assert "nothing" not in metrics.text().decode() and 'stat="name"' not in metrics.text().decode()
    info = [key for key in series(metrics) if key.startswith("pdq_worker_info")]
    assert len(info) == 1 and "'role', 'decode'" in info[0] and "'model', 'tiny'" in info[0]


def test_two_services_in_one_process_count_apart() -> None:
    one, two = Metrics(["tiny"]), Metrics(["tiny"])
    one.kv(1, 1)
    assert of(two, "pdq_kv_loaded_tokens_total") == 0


def test_what_clients_send_makes_no_series() -> None:
    metrics = Metrics(["tiny"])
    metrics.ended("tiny", "prefill-first", "finished")
    metrics.ended("unknown", "prefill-first", "finished")
    before = len(series(metrics))
    chance = random.Random(90)
    odd = ['"', "\n", "\\", "x" * 10_000, "{}", "é", "", *(f"model-{chance.random()}" for _ in range(3000))]
    for name in odd:
        metrics.ended(name, "prefill-first", "finished")
    assert len(series(metrics)) == before
    assert of(metrics, "pdq_requests_total", model="other", order="prefill-first", outcome="finished") == len(odd) + 1

    for name in odd:
        metrics.ended(name, name or "x", name)
        metrics.routed(name, name)
        metrics.dead_letter(name, name)
        metrics.stage(name, 0.1)
        metrics.engine({name: 1.0})
    for number in range(3000):
        metrics.routed("prefill-first", f"reason_{number}")
        metrics.dead_letter("decode", f"reason_{number}")
    text = metrics.text()
    assert len(text) < 1_000_000
    assert len(series(metrics)) < 1_000
    assert b"xxxx" not in text
    assert of(metrics, "pdq_route_decisions_total", order="prefill-first", reason="other") > 2_900
