"""One trace per request, over real services, at a real OTLP receiver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdq.client import Client, new_request_id
from pdq.settings import LimitSettings, TelemetrySettings
from pdq.telemetry import Telemetry

from tests import otlp
from tests.ask import ask
from tests.stack import MODEL, Stack, completion

SERVICES = ("pdq_router", "pdq_prefill", "pdq_decode")


@pytest.fixture(scope="module")
def collector() -> Iterator[otlp.Collector]:
    with otlp.collector() as found:
        yield found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, collector: otlp.Collector) -> Iterator[Stack]:
    stack = Stack(
        tmp_path_factory.mktemp("traced"),
        limits=LimitSettings(ack_wait_s=1.0),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint,
        OTEL_BSP_SCHEDULE_DELAY="200",
        PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100",
    )
    for module in SERVICES:
        stack.add(module)
    asyncio.run(stack.start())
    yield stack
    stack.stop()


@pytest.fixture
def telemetry(collector: otlp.Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    telemetry = Telemetry.start("cli", TelemetrySettings(), "test")
    yield telemetry
    telemetry.close()


async def test_a_request_is_one_trace_through_three_services(
    client: Client, collector: otlp.Collector, telemetry: Telemetry
) -> None:
    request = new_request_id()
    with telemetry.submit(request, "local", MODEL) as root:
        answer = await ask(
            client, completion("x" * 300, max_tokens=8, ignore_eos=True), request=request, headers=root.headers()
        )
    telemetry.close()
    spans = await asyncio.to_thread(collector.of_request, request, ended="process decode")
    assert otlp.assert_one_trace(spans) == answer.state.trace
    otlp.assert_services(spans, "cli", "router", "prefill", "decode")
    top = otlp.assert_no_orphans(spans)
    assert (top.name, top.service) == ("submit", "pdq-cli")
    otlp.assert_linked(spans)
    otlp.assert_stages_within_root(spans)

    by_id = {span.span_id: span for span in spans}
    parents = {span.name: by_id[span.parent_id].name for span in spans if span.parent_id and span.name != "queue"}
    assert parents["route"] == "submit"
    assert parents["process prefill"] == "route"
    assert parents["process decode"] == "process prefill"
    assert {name for name, parent in parents.items() if parent == "process prefill"} >= {"engine.prefill", "kv.store"}
    assert {name for name, parent in parents.items() if parent == "process decode"} >= {"kv.load", "engine.decode"}

    queues = {by_id[span.parent_id].name: span for span in otlp.named(spans, "queue")}
    assert set(queues) == {"route", "process prefill", "process decode"}
    assert all(span.end_ns > span.start_ns for span in queues.values()), "the waits show"
    decode = otlp.named(spans, "engine.decode")[0]
    assert list(decode.events) == ["first_token", "second_token", "last_token"]


async def test_no_prompt_and_no_answer_in_any_span(client: Client, collector: otlp.Collector) -> None:
    canary = "canary-phrase-7423"
    answer = await ask(client, completion(f"{canary} " * 20, max_tokens=8, ignore_eos=True))
    spans = await asyncio.to_thread(collector.of_request, answer.request, ended="process decode")
    told = repr(spans)
    assert canary not in told and answer.transcript.text not in told
    assert len(spans) > 5


async def test_a_callers_context_is_carried_and_a_bad_one_ignored(client: Client, collector: otlp.Collector) -> None:
    known = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
    answer = await ask(client, completion("y" * 100, max_tokens=2), headers=known)
    spans = await asyncio.to_thread(collector.of_request, answer.request, ended="process decode", outside="cd" * 8)
    assert otlp.assert_one_trace(spans) == "ab" * 16 == answer.state.trace
    otlp.assert_no_orphans(spans, outside="cd" * 8)
    bad = await ask(client, completion("z" * 100, max_tokens=2), headers={"traceparent": "garbage"})
    spans = await asyncio.to_thread(collector.of_request, bad.request, ended="process decode")
    otlp.assert_no_orphans(spans)


async def test_unsampled_requests_export_nothing(client: Client, collector: otlp.Collector) -> None:
    silent = {"traceparent": "00-" + "ee" * 16 + "-" + "cd" * 8 + "-00"}
    quiet = await ask(client, completion("q" * 100, max_tokens=2), headers=silent)
    loud = await ask(client, completion("l" * 100, max_tokens=2))
    await asyncio.to_thread(collector.of_request, loud.request, ended="process decode")
    with collector.arrived:
        assert not [span for span in collector.spans if span.attributes.get("pdq.request.id") == quiet.request]


async def test_a_second_attempt_is_a_second_process_span(stack: Stack, collector: otlp.Collector) -> None:
    failing = stack.add("pdq_decode", PDQ_ENGINE_SIM_FAULTS="decode.fail_first=1")
    steady = stack.services[2]
    steady.stop()
    failing.start()
    await asyncio.to_thread(failing.wait_ready)
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("a" * 100, max_tokens=2))
    await bus.close()
    steady.start()
    await asyncio.to_thread(steady.wait_ready)
    failing.stop()
    assert answer.state.decode.attempt == 2
    spans = await asyncio.to_thread(collector.of_request, answer.request, ended="engine.decode")
    attempts = otlp.named(spans, "process decode")
    assert sorted(span.attempt for span in attempts) == [1, 2]
    assert len({span.parent_id for span in attempts}) == 1


async def test_a_dead_collector_costs_no_request(tmp_path: Path) -> None:
    stack = Stack(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    stack.add("pdq_router")
    worker = stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    answers = [await ask(Client(bus, "local"), completion("d" * 100, max_tokens=3)) for _ in range(20)]
    await bus.close()
    await asyncio.to_thread(stack.stop)
    assert all(answer.terminal == ["finished"] for answer in answers)
    assert worker.log.read_text().count("127.0.0.1:9") <= 3, "one line, not one a span"
