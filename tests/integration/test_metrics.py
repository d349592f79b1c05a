"""/metrics of live services: every series that dashboards and alerts name, true values, bounded labels."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from pdq.bus import Bus
from pdq.client import Client
from pdq.settings import LimitSettings
from pdq.telemetry import Metrics
from pdq.telemetry.metrics import MAX_VALUES
from pdq_forwarder.metrics import ForwarderMetrics
from pdq_gateway.metrics import GatewayMetrics
from prometheus_client.parser import text_string_to_metric_families

from tests import promql
from tests.ask import ask
from tests.stack import MODEL, Service, Stack, completion

LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)
ELSEWHERE = ("pdq_gateway_", "pdq_site_", "pdq_given_back_")


async def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < give_up, "it did not come to that in time"
        await asyncio.sleep(0.1)


def samples(service: Service) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(service.get("/metrics")[1])
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(service: Service, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels; fails when there is none."""
    wanted = set(labels.items())
    found = [number for (each, has), number in samples(service).items() if each == name and wanted <= has]
    assert found, f"{service.module} has no {name} {labels}"
    return sum(found)


class Parts:
    """The services of a stack, by what they do."""

    def __init__(self, stack: Stack) -> None:
        self.router, self.prefill, self.decode = self.all = tuple(stack.services)

    def live(self) -> dict[str, set[str]]:
        """Every series that some service shows now, with its labels."""
        found: dict[str, set[str]] = {}
        for service in self.all:
            for name, labels in promql.exposed(service.get("/metrics")[1]).items():
                found.setdefault(name, set()).update(labels)
        return found


def made(directory: Path, **decode: str) -> Stack:
    stack = Stack(directory, limits=LIMITS)
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    stack.add("pdq_decode", **decode)
    return stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that has seen all that dashboards show: a redelivery, a dead letter, answers, a refusal."""
    stack = made(tmp_path_factory.mktemp("metrics"), PDQ_ENGINE_SIM_FAULTS="decode.fail_first=3")
    asyncio.run(_live_a_life(stack))
    yield stack
    stack.stop()


async def _live_a_life(stack: Stack) -> None:
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    # Three attempts fail: two redeliveries and a dead letter.
    assert (await ask(client, completion("f" * 100, max_tokens=3))).state.event == "failed"
    for number in range(8):
        answer = await ask(client, completion(f"{number} " * 60, max_tokens=6, ignore_eos=True))
        assert answer.state.event == "finished" and answer.state.order == "prefill-first"
    assert (await ask(client, completion("short", max_tokens=2))).state.order == "decode-only"
    assert (await ask(client, b'{"messages": 7}')).state.event == "failed"
    await bus.close()
    await until(lambda: "pdq_queue_depth" in Parts(stack).live())


@pytest.fixture
def parts(stack: Stack) -> Parts:
    return Parts(stack)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    bus = await stack.connect()
    yield Client(bus, "local")
    await bus.close()


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack for a test that stops parts of it."""
    stack = made(tmp_path)
    await stack.start()
    yield stack
    await asyncio.to_thread(stack.stop)


@pytest.fixture
async def other_bus(other: Stack) -> AsyncIterator[Bus]:
    bus = await other.connect()
    yield bus
    await bus.close()


OWN = ("pdq.json", "nats.json")


def elsewhere() -> dict[str, set[str]]:
    """The series of gateways and forwarders, which this stack does not have, and of what did not happen to it."""
    metrics = Metrics([])
    metrics.gave_back("decode", "newer_version")
    gateway = GatewayMetrics(metrics)
    gateway.ended("/v1/models", 200)
    gateway.first_byte("/v1/models", 0.1)
    ForwarderMetrics(metrics)
    found = promql.exposed(metrics.text().decode())
    return {name: labels for name, labels in found.items() if name.startswith(ELSEWHERE)}


@pytest.mark.parametrize("name", OWN)
def test_every_series_of_a_dashboard_is_live(parts: Parts, name: str) -> None:
    queries = promql.queries(name)
    assert len(queries) > 10
    assert promql.missing(queries, {**elsewhere(), **parts.live()}, "pdq_") == []


def test_every_series_of_the_alerts_is_live(parts: Parts) -> None:
    queries = promql.alert_queries()
    assert len(queries) >= 5
    assert promql.missing(queries, {**elsewhere(), **parts.live()}, "pdq_") == []


def test_a_series_that_is_not_there_is_found_out(parts: Parts) -> None:
    typing_error = promql.Query("made up", 'sum by (stage) (rate(pdq_queue_depht{stage="decode"}[5m]))')
    odd_label = promql.Query("made up", 'max by (stage) (pdq_queue_depth{tenant="acme"})')
    odd_group = promql.Query("made up", "max by (worker) (pdq_queue_depth)")
    assert promql.missing([typing_error, odd_label, odd_group], parts.live(), "pdq_") == [
        "made up: no series pdq_queue_depht",
        "made up: grouped by stage, which none of its series has",
        "made up: pdq_queue_depth has no label tenant",
        "made up: grouped by worker, which none of its series has",
    ]


def test_every_series_of_ours_is_on_a_dashboard_or_in_an_alert(parts: Parts) -> None:
    queries = [*promql.alert_queries(), *(query for name in OWN for query in promql.queries(name))]
    shown = {name for query in queries for name in promql.used(query.expr).series}
    beside = ("_created", "_sum", "_count")
    own = {name for name in parts.live() if name.startswith("pdq_") and not name.endswith(beside)}
    assert own - shown == {"pdq_worker_info"}


async def test_numbers_are_those_of_what_happened(parts: Parts) -> None:
    router, prefill, decode = parts.all
    assert value(router, "pdq_requests_total", outcome="failed") == 1
    assert value(router, "pdq_request_duration_seconds_count", outcome="failed") == 1
    assert value(router, "pdq_route_decisions_total", order="decode-only", reason="short_prompt") == 1
    assert value(router, "pdq_route_decisions_total", order="prefill-first") == 9
    await until(lambda: value(router, "pdq_stream_messages", stream="PDQ_DEAD") == 1)
    assert value(prefill, "pdq_handoffs_total", kv="ready") == 9
    assert value(prefill, "pdq_engine_tokens_total", stage="prefill") >= 9 * 100
    assert value(prefill, "pdq_kv_bytes_total", op="store") > 0
    assert value(decode, "pdq_requests_total", outcome="finished") == 9
    assert value(decode, "pdq_request_duration_seconds_count", outcome="finished") == 9
    assert value(decode, "pdq_redeliveries_total", stage="decode") == 2
    assert value(decode, "pdq_dead_letters_total", stage="decode", reason="unavailable") == 1
    assert value(decode, "pdq_kv_bytes_total", op="load") > 0
    assert value(decode, "pdq_engine_tokens_total", stage="decode") == 8 * 6 + 2
    assert value(decode, "pdq_second_token_seconds_count") == 9
    promised = value(decode, "pdq_kv_promised_tokens_total")
    assert value(decode, "pdq_kv_loaded_tokens_total") == promised >= 8 * 96


async def test_no_label_is_unbounded(parts: Parts, client: Client) -> None:
    """Requests of many models, fields and names, good and bad, add no series and leave no trace in a label."""
    names: list[str] = []

    async def odd(number: int) -> None:
        model, field, request = (f"{kind}{secrets.token_hex(6)}" for kind in "mfr")
        names.extend((model, field, request))
        prompt = f"{number} " * 50
        if number % 3 == 0:
            assert (await ask(client, completion(prompt), request=request, model=model)).state.event == "failed"
        elif number % 3 == 1:
            assert (await ask(client, completion(prompt, **{field: 1}), request=request)).state.event == "failed"
        else:
            assert (await ask(client, completion(prompt, max_tokens=2), request=request)).state.event == "finished"

    for number in range(6):
        await odd(number)
    before = {service.module: set(samples(service)) for service in parts.all}
    for number in range(60):
        await odd(number)
    for service in parts.all:
        now = set(samples(service))
        assert now - before[service.module] == set(), service.module
        assert {text for _, labels in now for _, text in labels}.isdisjoint([*names, "local"])
        values: dict[tuple[str, str], set[str]] = {}
        for name, labels in now:
            for label, text in labels:
                values.setdefault((name, label), set()).add(text)
        assert max(map(len, values.values())) <= MAX_VALUES
    assert value(parts.router, "pdq_requests_total", model="other") >= 22


async def test_queues_show_what_waits_and_for_how_long(other: Stack, other_bus: Bus) -> None:
    parts, client = Parts(other), Client(other_bus, "local")
    router = parts.router
    await asyncio.to_thread(parts.decode.stop)
    waiting = [
        await client.submit(completion("w" * 100, max_tokens=2), model=MODEL, priority=priority, order="decode-only")
        for priority in ("high", "low", "low")
    ]
    await until(lambda: value(router, "pdq_queue_depth", stage="decode", model=MODEL, priority="low") == 2)
    assert value(router, "pdq_queue_depth", stage="decode", model=MODEL, priority="high") == 1
    assert value(router, "pdq_queue_depth", stage="decode", model=MODEL, priority="normal") == 0
    assert value(router, "pdq_queue_depth", stage="route") == 0
    await until(lambda: value(router, "pdq_queue_oldest_seconds", stage="decode", priority="low") > 1)
    assert value(router, "pdq_queue_oldest_seconds", stage="decode", priority="normal") == 0
    assert value(router, "pdq_queue_oldest_unsettled_seconds", stage="decode", priority="low") > 1
    await until(lambda: value(router, "pdq_workers", stage="decode") == 0)
    assert value(router, "pdq_workers", stage="prefill") == 1
    assert value(router, "pdq_stage_slots", stage="prefill") == 8
    for request in waiting:
        await client.cancel(request.request)
    await until(lambda: value(router, "pdq_queue_depth", stage="decode") == 0)
    assert value(router, "pdq_queue_oldest_unsettled_seconds", stage="decode") == 0
    parts.decode.start()
    await until(lambda: value(router, "pdq_workers", stage="decode") == 1)


async def test_a_job_in_hand_is_claimed_until_it_is_settled(other: Stack, other_bus: Bus) -> None:
    parts, client = Parts(other), Client(other_bus, "local")
    router = parts.router
    await asyncio.to_thread(parts.prefill.stop)
    hanging = other.add("pdq_prefill", PDQ_ENGINE_SIM_FAULTS="prefill.hang=1")
    hanging.start()
    await asyncio.to_thread(hanging.wait_ready)
    sent = await client.submit(completion("h" * 100, max_tokens=2), model=MODEL)
    await until(lambda: value(router, "pdq_queue_claimed", stage="prefill") == 1)
    assert value(router, "pdq_queue_depth", stage="prefill") == 0
    await until(lambda: value(router, "pdq_queue_oldest_unsettled_seconds", stage="prefill") > 1)
    assert value(router, "pdq_queue_oldest_seconds", stage="prefill") == 0
    await until(lambda: value(router, "pdq_stage_busy_slots", stage="prefill") == 1)
    await client.cancel(sent.request)
    await until(lambda: value(router, "pdq_queue_claimed", stage="prefill") == 0)


async def test_a_fall_back_is_counted_with_its_reason(other: Stack, other_bus: Bus) -> None:
    parts = Parts(other)
    await asyncio.to_thread(parts.prefill.stop)
    await until(lambda: value(parts.router, "pdq_workers", stage="prefill") == 0)
    answer = await ask(Client(other_bus, "local"), completion("n" * 100, max_tokens=2))
    assert answer.state.order == "decode-only"
    assert value(parts.router, "pdq_route_decisions_total", order="decode-only", reason="no_prefill_worker") == 1


async def test_a_store_that_fails_is_counted_at_the_handoff(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    stack.add("pdq_router")
    stack.add("pdq_prefill", PDQ_ENGINE_SIM_FAULTS="store.fail=1")
    stack.add("pdq_decode")
    try:
        await stack.start()
        bus = await stack.connect()
        assert (await ask(Client(bus, "local"), completion("s" * 100, max_tokens=2))).state.event == "finished"
        await bus.close()
        assert value(stack.services[1], "pdq_handoffs_total", kv="store_failed") == 1
        assert value(stack.services[2], "pdq_kv_promised_tokens_total") == 0
    finally:
        await asyncio.to_thread(stack.stop)


async def test_a_broker_that_is_away_ends_the_series_of_its_queues(other: Stack) -> None:
    router = Parts(other).router
    await until(lambda: value(router, "pdq_broker_up") == 1)
    other.broker.kill()
    await until(lambda: value(router, "pdq_broker_up") == 0)
    assert "pdq_queue_depth" not in promql.exposed(router.get("/metrics")[1])
    other.broker.start()
    await until(lambda: value(router, "pdq_broker_up") == 1)
    assert value(router, "pdq_queue_depth") == 0
    # The broker remembers that there are workers, as soon as their beats come again.
    await until(lambda: value(router, "pdq_workers", stage="prefill") == 1)
    bus = await other.connect()
    answer = await ask(Client(bus, "local"), completion("b" * 100, max_tokens=2))
    await bus.close()
    assert answer.state.order == "prefill-first"
