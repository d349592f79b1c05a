"""The scaler's own query, against real brokers, while jobs come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq import subjects
from pdq.bus import Bus, Puller
from pdq.init import init
from pdq.messages import LANES, Lane, StageName
from pdq.settings import BusSettings, LimitSettings

from tests.broker import Broker, Cluster, free_port
from tests.scaling.keda import Number, Replicas, Scaled, Scaler, Trigger, Unknown, get_json, monitoring_url, of_stage
from tests.secured import SecuredStack
from tests.stack import MODEL

LIMITS = LimitSettings(ack_wait_s=1.0, max_deliver=2)
CONSUMERS = {lane: subjects.consumer(MODEL, lane) for lane in LANES}
PATIENCE_S = 20.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    broker.more = monitored("127.0.0.1", free_port())
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
async def bus(broker: Broker) -> AsyncIterator[Bus]:
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    await init(bus, LIMITS, [MODEL])
    yield bus
    await bus.close()


def monitored(host: str, port: int) -> str:
    return f'http: "{host}:{port}"\n'


def endpoint(broker: Broker) -> str:
    """Where its monitoring listens."""
    return broker.more.partition('http: "')[2].partition('"')[0]


def summed(stage: StageName, host: str, account: str = "$G") -> Number:
    return Number(of_stage(stage, MODEL, host, account))


async def queue(bus: Bus, *requests: str, stage: StageName = "decode", lane: Lane = "normal") -> None:
    for request in requests:
        await bus.publish(subjects.job(stage, MODEL, lane, "local", request), b"a job", msg_id=f"{stage}.{request}")


async def comes_to(lags: Number, wanted: int | None) -> None:
    """Until the scaler's number is as wanted."""
    give_up = time.monotonic() + PATIENCE_S
    while (found := await asyncio.to_thread(lags.value)) != wanted:
        assert time.monotonic() < give_up, f"{found}, not {wanted}"
        await asyncio.sleep(0.05)


def taking(bus: Bus) -> Puller:
    return Puller(bus, subjects.DECODE, list(CONSUMERS.values()))


async def test_the_number_is_what_waits_and_what_runs(broker: Broker, bus: Bus) -> None:
    decode, prefill = summed("decode", endpoint(broker)), summed("prefill", endpoint(broker))
    assert decode.value() == 0
    # with no worker anywhere, in every lane
    for lane in LANES:
        await queue(bus, f"r-{lane}", lane=lane)
    await comes_to(decode, 4)
    await queue(bus, "p-1", stage="prefill")
    await comes_to(prefill, 1)
    assert decode.value() == 4
    # what is claimed counts on
    worker = taking(bus)
    one = await worker.get()
    assert decode.value() == 4
    # what is given back, too: at once, and while it waits for its delay
    await one.nak()
    one = await worker.get()
    await one.nak(30.0)
    await asyncio.sleep(0.2)
    assert decode.value() == 4
    # what is done does not, nor what is refused for good
    two, three = await worker.get(), await worker.get()
    await two.ack()
    await comes_to(decode, 3)
    await three.term("test")
    await comes_to(decode, 2)
    # a cancelled request's job is purged, even one that waits for its delay
    for request in ("r-high", "r-normal", "r-low", "r-excess"):
        await bus.purge(subjects.DECODE, subjects.any_job("decode", "local", request))
    await comes_to(decode, 0)
    assert prefill.value() == 1
    await worker.close()


async def test_a_dead_workers_job_counts_until_it_is_given_up(broker: Broker, bus: Bus) -> None:
    decode = summed("decode", endpoint(broker))
    worker = taking(bus)
    await queue(bus, "r-1")
    await worker.get()
    await asyncio.sleep(2 * LIMITS.ack_wait_s)
    assert decode.value() == 1, "nobody has it, but it is to be done again"
    assert (await worker.get()).num_delivered == LIMITS.max_deliver
    await asyncio.sleep(2 * LIMITS.ack_wait_s)
    assert decode.value() == 1, "only a pull makes the broker give it up: so there must be a worker"
    waiting = asyncio.create_task(worker.get())
    await comes_to(decode, 0)
    info = await bus.stream_info(subjects.DECODE)
    assert info is not None and info["state"]["messages"] == 1, "it stays until the reaper takes it away"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await worker.close()


async def test_the_number_outlives_the_broker(broker: Broker, bus: Bus) -> None:
    decode = summed("decode", endpoint(broker))
    worker = taking(bus)
    await queue(bus, "r-1", "r-2", "r-3")
    await worker.get()
    await comes_to(decode, 3)
    broker.kill()
    assert decode.value() is None
    broker.start()
    await comes_to(decode, 3)
    await worker.close()


async def test_what_is_not_there_is_no_number(broker: Broker, bus: Bus) -> None:
    host = endpoint(broker)
    known = Trigger(endpoint=host, stream=subjects.DECODE, consumer=CONSUMERS["normal"])
    assert Scaler(known).lag() == 0
    for stream, consumer, account in (
        (subjects.DECODE, "other-normal", "$G"),
        ("OTHER", CONSUMERS["normal"], "$G"),
        (subjects.DECODE, CONSUMERS["normal"], "PDQ"),
    ):
        with pytest.raises(Unknown):
            Scaler(Trigger(endpoint=host, account=account, stream=stream, consumer=consumer)).lag()


async def test_the_number_of_an_account(tmp_path: Path) -> None:
    stack = SecuredStack(tmp_path, ["acme"])
    host = f"127.0.0.1:{free_port()}"
    stack.broker.more += f'http: "{host}"\n'
    try:
        await stack.start()
        bus = await stack.connect("router")
        decode = summed("decode", host, "PDQ")
        assert decode.value() == 0
        await queue(bus, "r-1", "r-2")
        await comes_to(decode, 2)
        # Without the account's name there is no number: that of no account is another's.
        assert summed("decode", host).value() is None
        await bus.close()
    finally:
        stack.stop()


async def test_the_leader_is_asked_wherever_it_is(tmp_path: Path) -> None:
    """Three servers, whose consumers' leaders are anywhere; followers do not know how much waits."""
    cluster, port = Cluster(tmp_path), free_port()
    for number, broker in enumerate(cluster.brokers, 1):
        # One port on three addresses, as in Kubernetes: the scaler looks for all of them on the endpoint's port.
        broker.more += f'{monitored(f"127.0.0.{number}", port)}client_advertise: "127.0.0.{number}:{broker.port}"\n'
    try:
        cluster.start()
        bus = await Bus.connect(BusSettings(url=cluster.url), "test")
        await init(bus, LimitSettings(replicas=3), [MODEL])
        worker = taking(bus)
        await queue(bus, *(f"r-{number}" for number in range(9)))
        for _ in range(4):
            await (await worker.get()).ack()
        running = await worker.get()
        everywhere = [summed("decode", endpoint(broker)) for broker in cluster.brokers]
        for lags in everywhere:
            await comes_to(lags, 5)
        info = await bus.consumer_info(subjects.DECODE, CONSUMERS["normal"])
        assert info is not None
        led = cluster.brokers[int(info["cluster"]["leader"].removeprefix("n"))]
        led.kill()
        others = [lags for lags, broker in zip(everywhere, cluster.brokers, strict=True) if broker is not led]
        for lags in others:
            await comes_to(lags, 5)
        # One that began there has no number, and says so.
        assert summed("decode", endpoint(led)).value() is None
        await running.ack()
        for lags in others:
            await comes_to(lags, 4)
        await worker.close()
        await bus.close()
    finally:
        cluster.stop()


def test_the_request_is_the_scalers() -> None:
    assert monitoring_url("nats:8222", "$G") == "http://nats:8222/jsz?acc=%24G&config=true&consumers=true"


def test_servers_that_are_not_advertised_are_asked_by_name() -> None:
    """As in the chart of NATS with `noAdvertise`: the endpoint must be the headless service."""
    consumer = {"name": "c", "num_pending": 2, "num_ack_pending": 1, "cluster": {"leader": "nats-1"}}
    stream = {"name": "S", "consumer_detail": [consumer]}
    answer = {"meta_cluster": {"cluster_size": 3}, "account_details": [{"name": "$G", "stream_detail": [stream]}]}
    routes = ["nats-0.headless.ns:6222", "nats-1.headless.ns:6222"]
    asked: list[str] = []

    def fetch(url: str) -> dict[str, Any]:
        asked.append(url.split("/")[2])
        return {"server_name": "nats-0", "cluster": {"urls": routes}} if url.endswith("/varz") else answer

    scaler = Scaler(Trigger(endpoint="headless.ns:8222", stream="S", consumer="c"), fetch)
    assert scaler.lag() == 3
    assert asked == ["headless.ns:8222", "headless.ns:8222", "nats-0.headless.ns:8222", "nats-1.headless.ns:8222"]
    asked.clear()
    assert scaler.lag() == 3 and asked == ["nats-1.headless.ns:8222"]


SCALED = Scaled(triggers={}, target=4, max_replicas=3, cooldown_s=10.0, stabilization_s=5.0)


def test_from_zero_to_one_to_many_and_back() -> None:
    replicas = Replicas(SCALED)
    steps = [
        (0.0, 0, 0, 0),
        (1.0, 1, 0, 1),  # woken
        (2.0, 9, 1, 3),  # ceil(9 / 4)
        (3.0, 99, 3, 3),  # no more than there may be
        (4.0, 4, 3, 3),  # held for a while, then fewer
        (8.5, 4, 3, 1),
        (9.0, 0, 1, 1),  # cooling down from 8.5
        (18.0, 0, 1, 1),
        (18.6, 0, 1, 0),
        (19.0, 0, 0, 0),
    ]
    for now, value, current, wanted in steps:
        assert replicas.decide(value, current, now) == wanted, now


def test_what_is_near_the_target_changes_nothing() -> None:
    of_ten = Scaled(triggers={}, target=10)
    assert [Replicas(of_ten).decide(value, 2, 0.0) for value in (17, 19, 21, 23)] == [2, 2, 2, 3]


def test_activation_is_what_must_be_exceeded() -> None:
    replicas = Replicas(Scaled(triggers={}, target=4, activation=2, cooldown_s=10.0))
    assert [replicas.decide(value, 0, 0.0) for value in (0, 2, 3)] == [0, 0, 1]


def test_without_a_number_nothing_changes_until_the_fallback() -> None:
    none = Replicas(SCALED)
    assert [none.decide(None, 2, now) for now in range(20)] == [2] * 20
    falls_back = Replicas(Scaled(triggers={}, target=4, fallback=1, fallback_after=3))
    assert [falls_back.decide(None, 0, now) for now in range(4)] == [0, 0, 1, 1]
    assert falls_back.decide(None, 3, 4.0) == 3, "nobody is stopped meanwhile"
    assert falls_back.decide(0, 0, 5.0) == 0
    assert falls_back.decide(None, 0, 6.0) == 0


def test_the_query_works_with_the_brokers_own_json(broker: Broker) -> None:
    """Before `pdq init` an account has no streams: no number, and no crash."""
    assert get_json(monitoring_url(endpoint(broker), "$G"))["account_details"]
    assert summed("decode", endpoint(broker)).value() is None
