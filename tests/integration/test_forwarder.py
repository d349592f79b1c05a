"""The forwarder of a site, between two real brokers: what it sends to the hub, and how often."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nats.aio.msg import Msg
from pdq import subjects
from pdq.bus import Bus, Puller
from pdq.client import Client, new_request_id
from pdq.errors import Misconfigured, QueueFull, Unavailable
from pdq.init import init, init_edge
from pdq.settings import BusSettings, LimitSettings
from pdq.telemetry import Metrics
from pdq.traces import TraceSpan, find
from pdq_forwarder.forward import onward
from pdq_forwarder.metrics import ForwarderMetrics
from pdq_forwarder.uplink import Uplink

from tests.ask import follow_to_end
from tests.broker import Broker
from tests.secured import Peer
from tests.site import OpenHub, Site
from tests.stack import MODEL, Service, Stack, chat

AT_HUB, AT_SITE = 8, 24
"""Requests of one model that each queue takes."""
HUB_BYTES = 16 << 10


class Rig(NamedTuple):
    hub: OpenHub
    site: Site
    router: Service
    forwarder: Service


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    limits = LimitSettings(submit_per_subject=AT_HUB, max_msg_bytes=HUB_BYTES)
    hub = OpenHub(tmp_path_factory.mktemp("hub"), "plant", limits=limits)
    site = Site(hub, "plant", limits=LimitSettings(submit_per_subject=AT_SITE))
    router = hub.add("pdq_router")
    hub.add("pdq_worker")
    forwarder = site.add("pdq_forwarder")
    try:
        asyncio.run(hub.start())
        asyncio.run(site.start())
        yield Rig(hub, site, router, forwarder)
    finally:
        site.stop()
        hub.stop()


@pytest.fixture
async def bus(rig: Rig) -> AsyncIterator[Bus]:
    """At the site."""
    bus = await rig.site.connect()
    yield bus
    await bus.close()


@pytest.fixture
async def client(bus: Bus) -> Client:
    return Client(bus, "plant")


async def waiting(bus: Bus) -> tuple[int, int]:
    """Requests at the site that no forwarder has, and that one has."""
    info = await bus.consumer_info(subjects.EDGE, subjects.FORWARDER_CONSUMER)
    assert info is not None
    return int(info["num_pending"]), int(info["num_ack_pending"])


async def until_waiting(bus: Bus, wanted: tuple[int, int]) -> None:
    for _ in range(400):
        if (found := await waiting(bus)) == wanted:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(found)


async def stored_at_hub(hub: Stack) -> int:
    """How many submits it has had."""
    bus = await hub.connect()
    info = await bus.stream_info(subjects.SUBMIT)
    await bus.close()
    assert info is not None
    return int(info["state"]["last_seq"])


async def test_requests_that_waited_for_the_uplink_arrive_in_order_and_once(rig: Rig, client: Client) -> None:
    before = await stored_at_hub(rig.hub)
    forged = {"Pdq-Site-Seq": "1", "Pdq-Site-Time": "1", "Nats-Msg-Id": "1"}
    rig.site.uplink.cut()
    names = [new_request_id() if number % 2 else "" for number in range(12)]
    submitted = []
    for name in names:
        submitted.append(await client.submit(chat("hello", max_tokens=4), model=MODEL, request=name, headers=forged))
        # Past the window in which the site's broker takes one id for one message.
        await asyncio.sleep(0.15)
    rig.site.uplink.heal()
    answers = [await follow_to_end(client, each.request) for each in submitted]
    assert [each.request for each in submitted] == [
        name or f"e-{each.seq}" for name, each in zip(names, submitted, strict=True)
    ]
    assert [answer.story[-1] for answer in answers] == ["finished"] * 12
    assert [answer.state.submit_seq for answer in answers] == list(range(before + 1, before + 13))


async def test_what_waited_past_its_deadline_expires_and_never_runs(rig: Rig, client: Client) -> None:
    rig.site.uplink.cut()
    late = await client.submit(chat("hello"), model=MODEL, deadline_s=0.5)
    fine = await client.submit(chat("hello", max_tokens=4), model=MODEL, deadline_s=60)
    await asyncio.sleep(1)
    rig.site.uplink.heal()
    answer = await follow_to_end(client, late.request)
    assert answer.story == ["accepted", "expired"]
    assert answer.state.error.code == "deadline_exceeded"
    assert (await follow_to_end(client, fine.request)).terminal == ["finished"]


async def test_what_the_hub_never_takes_fails_under_its_name_and_holds_nothing_up(rig: Rig, client: Client) -> None:
    large = chat("x" * HUB_BYTES)
    named = await client.submit(large, model=MODEL, request=new_request_id())
    unnamed = await client.submit(large, model=MODEL)
    fine = await client.submit(chat("hello", max_tokens=4), model=MODEL)
    for submitted in (named, unnamed):
        answer = await follow_to_end(client, submitted.request)
        assert answer.story == ["accepted", "failed"]
        assert (answer.state.error.code, f"{len(large)} bytes" in answer.state.error.message) == (
            "payload_too_large",
            True,
        )
    assert (await follow_to_end(client, fine.request)).terminal == ["finished"]
    assert "outcome=without_body" in rig.forwarder.log.read_text()


async def test_a_forwarder_that_dies_before_it_acknowledges_doubles_nothing(rig: Rig, bus: Bus, client: Client) -> None:
    assert rig.forwarder.stop() == 0
    before = await stored_at_hub(rig.hub)
    submitted = [
        await client.submit(chat("hello", max_tokens=4), model=MODEL, request=name) for name in (new_request_id(), "")
    ]
    puller = Puller(bus, subjects.EDGE, [subjects.FORWARDER_CONSUMER])
    for _ in submitted:
        delivery = await puller.get()
        await bus.offer(subjects.hub_submit(MODEL), delivery.data, headers=onward(delivery, {}), timeout_s=5)
    await puller.close()
    rig.forwarder.start()
    rig.forwarder.wait_ready()
    await until_waiting(bus, (0, 0))
    answers = [await follow_to_end(client, each.request) for each in submitted]
    assert await stored_at_hub(rig.hub) == before + 4
    for answer in answers:
        assert answer.story.count("accepted") == 1 and answer.terminal == ["finished"]
        assert answer.state.decode.attempt == 1


async def test_nothing_is_sent_twice_to_a_hub_that_is_slow(rig: Rig, bus: Bus, client: Client) -> None:
    before = await stored_at_hub(rig.hub)
    rig.site.uplink.delay(1.5)
    submitted = [await client.submit(chat("hello", max_tokens=4), model=MODEL) for _ in range(3)]
    await until_waiting(bus, (0, 0))
    rig.site.uplink.heal()
    answers = [await follow_to_end(client, each.request) for each in submitted]
    assert [answer.terminal for answer in answers] == [["finished"]] * 3
    assert await stored_at_hub(rig.hub) == before + 3


async def test_two_forwarders_forward_each_request_once(rig: Rig, client: Client) -> None:
    second = rig.site.add("pdq_forwarder")
    second.start()
    second.wait_ready()
    before = await stored_at_hub(rig.hub)
    asked = [client.submit(chat("hello", max_tokens=4), model=MODEL) for _ in range(AT_SITE - 4)]
    answers = [await follow_to_end(client, each.request) for each in await asyncio.gather(*asked)]
    assert [answer.terminal for answer in answers] == [["finished"]] * len(asked)
    assert await stored_at_hub(rig.hub) == before + len(asked)
    assert second.stop() == 0


async def test_the_hubs_back_pressure_reaches_the_sites_clients(rig: Rig, bus: Bus, client: Client) -> None:
    assert rig.router.stop() == 0
    accepted = []
    with pytest.raises(QueueFull):
        for _ in range(AT_HUB + AT_SITE + 1):
            accepted.append(await client.submit(chat("hello", max_tokens=4), model=MODEL))
            if len(accepted) == AT_HUB:
                await until_waiting(bus, (0, 0))
    assert len(accepted) == AT_HUB + AT_SITE
    assert sum(await waiting(bus)) == AT_SITE
    assert 'pdq_site_refusals_total{cause="queue_full"} 0.0' not in rig.forwarder.get("/metrics")[1]
    assert json.loads(rig.forwarder.get("/readyz")[1])["checks"]["uplink"]["ok"]
    rig.router.start()
    answers = [await follow_to_end(client, each.request) for each in accepted]
    assert [answer.terminal for answer in answers] == [["finished"]] * len(accepted)
    rig.router.wait_ready()


async def test_a_forwarder_that_stops_gives_back_what_it_could_not_send(rig: Rig, bus: Bus, client: Client) -> None:
    rig.site.uplink.cut()
    submitted = await client.submit(chat("hello", max_tokens=4), model=MODEL)
    await until_waiting(bus, (0, 1))
    # It has the request before it knows that the uplink is down.
    for _ in range(200):
        ready = json.loads(rig.forwarder.get("/readyz")[1])
        if not ready["checks"]["uplink"]["ok"]:
            break
        await asyncio.sleep(0.05)
    assert (ready["ready"], ready["degraded"], ready["checks"]["uplink"]["ok"]) == (True, True, False)
    assert rig.forwarder.stop() == 0
    puller = Puller(bus, subjects.EDGE, [subjects.FORWARDER_CONSUMER])
    async with asyncio.timeout(subjects.EDGE_ACK_WAIT_S / 2):
        delivery = await puller.get()
    await delivery.nak()
    await puller.close()
    rig.forwarder.start()
    rig.site.uplink.heal()
    assert (await follow_to_end(client, submitted.request)).terminal == ["finished"]
    rig.forwarder.wait_ready()


async def test_the_wait_at_the_site_is_a_span_of_the_requests_trace(rig: Rig, client: Client, tmp_path: Path) -> None:
    trace, parent = "5" * 32, "7" * 16
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    submitted = await client.submit(chat("hello", max_tokens=4), model=MODEL, headers=headers)
    await follow_to_end(client, submitted.request)
    spans = await spans_of(rig, trace, tmp_path)
    forward, route = spans["forward"], spans["route"]
    assert (forward.parent_id, forward.links, forward.service) == (parent, [parent], "forwarder")
    assert forward.attributes["pdq.request.id"] == submitted.request
    assert forward.attributes["messaging.destination.name"] == "PDQ_EDGE"
    assert "queue" in [child.name for child in forward.children]
    assert route.parent_id == forward.span_id


async def spans_of(rig: Rig, trace: str, directory: Path) -> dict[str, TraceSpan]:
    """By name; both brokers' sides."""
    for _ in range(100):
        for stack in (rig.hub, rig.site):
            for file in stack.directory.glob("*.jsonl"):
                shutil.copy(file, directory / f"{stack.directory.name}-{file.name}")
        found = {span.name: span for each in find(directory, trace) for span in each.spans}
        if {"forward", "route"} <= found.keys():
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(found.keys())


async def test_what_is_lost_on_the_way_is_known_by_the_answer_to_a_later_question(broker: Broker) -> None:
    """Here the test is the hub: it says nothing to the first request, and refuses whatever only asks."""
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    hub = await Peer.connect(broker.url)
    heard: list[bytes] = []

    async def answer(message: Msg) -> None:
        if message.headers and "Nats-Expected-Stream" in message.headers:
            await message.respond(b'{"error": {"code": 400, "err_code": 10060, "description": "another stream"}}')
        elif len(heard) > 1:
            await message.respond(b'{"stream": "PDQ_SUBMIT", "seq": 1}')
        heard.append(message.data)

    await hub.client.subscribe(subjects.hub_submit("*"), cb=answer)
    await hub.settle()
    uplink = Uplink(bus, ForwarderMetrics(Metrics(())))
    with pytest.raises(Unavailable):
        await uplink.check()
    asking = asyncio.create_task(uplink.run())
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable, match="lost on the way"):
            await uplink.submit(MODEL, b"one", {})
        await uplink.check()
        await uplink.submit(MODEL, b"one", {})
    assert heard.count(b"one") == 2
    asking.cancel()
    await hub.client.close()
    await bus.close()


# ---- pdq init --edge


def edge_init(broker: Broker) -> dict[str, Any]:
    environment = {"PATH": "", "PDQ_NATS_URL": broker.url, "PDQ_MODELS": "/nowhere"}
    command = [sys.executable, "-m", "pdq", "init", "--edge", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)["made"]
    return made


async def test_a_site_whose_store_was_lost_gives_no_name_twice(broker: Broker, tmp_path: Path) -> None:
    assert set(edge_init(broker).values()) == {"created"}
    last = await submit_once(broker)
    assert edge_init(broker) == {
        "PDQ_EDGE": "unchanged",
        "KV_PDQ_TENANTS": "unchanged",
        "PDQ_EDGE/forwarder": "unchanged",
    }
    assert await submit_once(broker) == last + 1
    broker.kill()
    shutil.rmtree(tmp_path / "store")
    broker.start()
    edge_init(broker)
    assert await submit_once(broker) > last + 1


async def test_other_limits_of_a_site_change_no_name(broker: Broker) -> None:
    edge_init(broker)
    last = await submit_once(broker)
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    assert (await init_edge(bus, LimitSettings(submit_per_subject=7)))["PDQ_EDGE"] == "updated"
    await bus.close()
    assert await submit_once(broker) == last + 1


async def submit_once(broker: Broker) -> int:
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    ack = await bus.publish(subjects.edge_submit(MODEL), b"{}")
    await bus.close()
    return ack.seq


async def test_without_init_a_forwarder_says_what_to_run(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    service = stack.add("pdq_forwarder")
    stack.broker.start()
    try:
        service.start()
        assert service.process is not None
        assert await asyncio.to_thread(service.process.wait, 20) == 2
        assert "run `pdq init --edge`" in service.log.read_text()
    finally:
        stack.stop()


async def test_a_site_is_not_made_a_hub_nor_a_hub_a_site(rig: Rig, bus: Bus) -> None:
    with pytest.raises(Misconfigured, match="it is a site's: `pdq init --edge`"):
        await init(bus, LimitSettings(), [MODEL])
    hub = await rig.hub.connect()
    try:
        with pytest.raises(Misconfigured, match="it is a hub's: `pdq init`"):
            await init_edge(hub, LimitSettings())
    finally:
        await hub.close()
