"""Faults that chaos runs found, each made to happen for certain."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq import subjects
from pdq.bus import Bus, Outbox, Puller
from pdq.client import Client, Follower, new_request_id
from pdq.errors import Unavailable
from pdq.log import RequestLog
from pdq.log import first as first_state
from pdq.log import follow as follow_state
from pdq.messages import Output, encode_json
from pdq.settings import BusSettings, LimitSettings
from pdq.telemetry import Metrics
from pdq_router.endings import Endings
from pdq_router.endpoints import Endpoints

from tests.ask import Answer
from tests.broker import Broker, live_copy
from tests.chaos.proxy import Proxy
from tests.stack import MODEL, Stack, completion

SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama2-70b-h100-tp8"}
"""About 30 ms a token."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0))
    yield stack
    stack.stop()


def job(request: str) -> str:
    return subjects.job("prefill", MODEL, "normal", "t", request)


def puller(bus: Bus) -> Puller:
    return Puller(bus, subjects.PREFILL, [subjects.consumer(MODEL, p) for p in ("high", "normal", "low")])


async def test_a_pull_hears_at_once_that_its_consumer_is_gone(bus: Bus) -> None:
    pull = puller(bus)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.3)
    await bus.api(f"CONSUMER.DELETE.{subjects.PREFILL}.{subjects.consumer(MODEL, 'low')}")
    async with asyncio.timeout(5):
        while not pull.missing:
            await asyncio.sleep(0.02)
    await bus.publish(job("r1"), b"")
    delivery = await asyncio.wait_for(waiting, 5)
    await delivery.ack()
    await pull.close()


async def test_a_client_cannot_hide_its_message_behind_a_status_header(bus: Bus) -> None:
    await bus.publish(job("r1"), b"", headers={"Status": "404"})
    pull = puller(bus)
    delivery = await asyncio.wait_for(pull.get(), 5)
    assert (subjects.parse_job(delivery.subject).request, delivery.num_delivered) == ("r1", 1)
    await delivery.ack()
    await pull.close()


async def test_a_broker_that_goes_away_while_a_service_starts_is_waited_for(broker: Broker, bus: Bus) -> None:
    outbox = Outbox(bus)
    broker.kill()
    checking = asyncio.create_task(bus.check_consumers([(subjects.SUBMIT, subjects.ROUTER_CONSUMER)]))
    starting = asyncio.create_task(bus.patiently(outbox.start))
    await asyncio.sleep(1)
    await asyncio.to_thread(broker.start)
    await asyncio.wait_for(asyncio.gather(checking, starting), 20)
    channel = outbox.channel(subjects.out("t", "r1"))
    await channel.send(b"token")
    await channel.flush(5)
    await outbox.close()


async def test_a_service_that_waits_for_the_broker_stops_when_told_to(stack: Stack) -> None:
    for module in ("pdq_router", "pdq_worker"):
        service = stack.add(module)
        service.start()
        async with asyncio.timeout(20):
            while "waiting for the broker" not in service.log.read_text():
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(service.stop, 8) == 0


async def follow(client: Client, body: bytes, happen: Callable[[Answer], Awaitable[None]], **options: Any) -> Answer:
    """Ask, and let something happen meanwhile; `happen` gets the answer as it grows."""
    answer = Answer(new_request_id())
    async with client.follow(answer.request, catch_up=False) as follower:
        await client.submit(body, model=MODEL, request=answer.request, **options)
        task = asyncio.create_task(happen(answer))
        async for event in follower.events(60):
            answer.take(event)
        await task
    return answer


async def tokens(answer: Answer, number: int) -> None:
    while len(answer.transcript.ids) < number:
        await asyncio.sleep(0.01)


async def test_a_worker_that_finds_a_cancel_in_place_of_the_dead_one_says_what_was_shown(stack: Stack) -> None:
    router = stack.add("pdq_router")
    first = stack.add("pdq_decode", **SLOW)
    await stack.start()
    second = stack.add("pdq_decode")
    bus = await stack.connect()
    log = RequestLog(bus)

    async def cancel(answer: Answer) -> None:
        await tokens(answer, 10)
        first.kill()
        router.kill()
        await log.update("t", answer.request, lambda newest: newest and follow_state(newest.state, "cancelling"))
        second.start()
        async with asyncio.timeout(60):
            while (entry := await log.current("t", answer.request)) is None or not entry.state.ended:
                await asyncio.sleep(0.05)
        # The worker ended it, with no router to do so. A follower reads what may lie before a state.
        router.start()

    body = completion("k" * 20, max_tokens=500, ignore_eos=True)
    answer = await follow(Client(bus, "t"), body, cancel, order="decode-only")
    await bus.close()
    assert answer.terminal == ["cancelled"] and answer.transcript.complete()
    shown = len(answer.transcript.ids)
    assert answer.state.num_tokens == answer.state.usage.completion_tokens == shown >= 10
    assert answer.state.output_digest == answer.transcript.digest()


async def test_a_request_given_up_says_what_was_shown(stack: Stack) -> None:
    stack.add("pdq_router")
    # With time between its tokens, so that the first are out before it dies.
    dying = {"PDQ_ENGINE_SIM_FAULTS": "decode.exit_after=9", "PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100*4"}
    workers = [stack.add("pdq_decode", **dying) for _ in range(3)]
    await stack.start()
    bus = await stack.connect()
    spare = stack.add("pdq_decode")

    async def replace(answer: Answer) -> None:
        while any(worker.process is not None and worker.process.poll() is None for worker in workers):
            await asyncio.sleep(0.05)
        spare.start()

    body = completion("k" * 20, max_tokens=50, ignore_eos=True)
    answer = await follow(Client(bus, "t"), body, replace, order="decode-only")
    await bus.close()
    assert answer.terminal == ["failed"] and answer.state.error.code == "too_many_attempts"
    assert answer.transcript.ids and answer.state.num_tokens == len(answer.transcript.ids)
    assert answer.transcript.complete() and answer.state.usage.completion_tokens == answer.state.num_tokens


async def test_a_reader_that_was_cut_off_reads_the_log_before_it_believes_the_end(stack: Stack) -> None:
    """The end can arrive over the new connection before anything tells that there is a new connection, and
    while no router answers: the tokens stored in between must come first all the same."""
    router = stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    log = RequestLog(bus)
    accepted = await log.append("t", "r1", None, first_state("accepted"))
    out = await bus.publish(subjects.out("t", "r1"), encode_json(Output.of(1, 0, [7, 8, 9], "abc")))
    end = await log.append("t", "r1", accepted, follow_state(accepted.state, "cancelled"))
    router.kill()
    stored = {record.seq: record for record in await bus.read(subjects.LOG, subjects.log_of("t", "r1"))}
    async with Client(bus, "t").follow("r1", catch_up=False) as follower:
        follower.take(live_copy(stored[accepted.seq], 0))
        await bus._disconnected()
        follower.take(live_copy(stored[end.seq], accepted.seq))
        await bus._reconnected()
        reading = asyncio.create_task(seen(follower))
        await asyncio.sleep(0.5)
        router.start()
        assert await asyncio.wait_for(reading, 20) == [accepted.seq, out.seq, end.seq]
    await bus.close()


async def seen(follower: Follower) -> list[int]:
    return [event.seq async for event in follower.events(20)]


async def test_a_log_that_cannot_be_read_is_not_an_empty_one(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    await bus.api(f"STREAM.DELETE.{subjects.LOG}")
    with pytest.raises(Unavailable):
        await Client(bus, "t").state("r1")
    await bus.close()


@pytest.fixture
async def cut_off(broker: Broker) -> AsyncIterator[tuple[Bus, Proxy]]:
    """A connection through a proxy that can be cut."""
    proxy = Proxy(broker.port)
    await proxy.start()
    bus = await Bus.connect(BusSettings(url=proxy.url), "cut off")
    yield bus, proxy
    proxy.heal()
    await bus.close()
    await proxy.close()


async def connected(bus: Bus, wanted: bool) -> None:
    async with asyncio.timeout(10):
        while bus.connected != wanted:
            await asyncio.sleep(0.01)


async def test_who_comes_back_does_not_take_all_that_was_asked_for_meanwhile(
    bus: Bus, cut_off: tuple[Bus, Proxy]
) -> None:
    """Each delivery counts towards the number after which the broker gives a message up."""
    away, proxy = cut_off
    pull = Puller(away, subjects.PREFILL, [subjects.consumer(MODEL, "normal")])
    proxy.cut()
    await connected(away, False)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(6)
    for number in range(4):
        await bus.publish(job(f"r{number}"), b"")
    proxy.heal()
    deliveries = [await asyncio.wait_for(waiting, 10)]
    deliveries += [await asyncio.wait_for(pull.get(), 10) for _ in range(3)]
    assert [delivery.num_delivered for delivery in deliveries] == [1, 1, 1, 1]
    await pull.close()


@pytest.mark.parametrize("limits", [LimitSettings(ack_wait_s=1.0)])
async def test_who_comes_back_does_not_give_back_what_is_another_s_by_now(bus: Bus, cut_off: tuple[Bus, Proxy]) -> None:
    away, proxy = cut_off
    await bus.publish(job("r1"), b"")
    first = await asyncio.wait_for(puller(away).get(), 5)
    proxy.cut()
    await connected(away, False)
    await first.nak()
    second = await asyncio.wait_for(puller(bus).get(), 5)
    proxy.heal()
    await connected(away, True)
    await away.flush()
    await second.in_progress()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(puller(bus).get(), 0.5)
    await second.ack()


async def test_a_submit_that_kills_its_routers_ends_its_request(tmp_path: Path) -> None:
    limits = LimitSettings(ack_wait_s=0.5, max_deliver=2)
    stack = Stack(tmp_path, limits=limits)
    try:
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "t")
        await client.submit(completion("k"), model=MODEL, request="mine")
        nameless = await client.submit(completion("k"), model=MODEL)
        dying = Puller(bus, subjects.SUBMIT, [subjects.ROUTER_CONSUMER])
        for _ in range(4):
            taken = await asyncio.wait_for(dying.get(), 5)
            request = taken.headers.get("Pdq-Request", nameless.request)
            accepted = first_state("accepted", submit_seq=taken.seq, digest=hashlib.sha256(taken.data).hexdigest())
            await RequestLog(bus).update("t", request, lambda newest, new=accepted: None if newest else new)
        await dying.close()
        router = stack.add("pdq_router", PDQ_LIMIT_MAX_DELIVER="2")
        router.start()
        for request in ("mine", nameless.request):
            async with client.follow(request) as follower:
                events = [event async for event in follower.events(20)]
            assert [event.state and event.state.event for event in events] == ["accepted", "failed"]
            assert events[1].state is not None and events[1].state.error is not None
            assert events[1].state.error.code == "too_many_deliveries"
            assert await bus.last(subjects.DEAD, subjects.dead("route", MODEL, "t", request)) is not None
        await bus.close()
    finally:
        stack.stop()


async def test_a_job_that_the_broker_gives_up_ends_its_request(tmp_path: Path) -> None:
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=0.5, max_deliver=2))
    try:
        stack.add("pdq_router")
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "t")

        async def die(answer: Answer) -> None:
            dying = Puller(bus, subjects.DECODE, [subjects.consumer(MODEL, "normal")])
            for _ in range(2):
                await asyncio.wait_for(dying.get(), 5)
            # The broker gives a message up when somebody asks for the next one.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dying.get(), 2)
            await dying.close()

        answer = await follow(client, completion("k"), die, order="decode-only")
        letter = await bus.last(subjects.DEAD, subjects.dead("decode", MODEL, "t", answer.request))
        info = await bus.stream_info(subjects.DECODE)
        await bus.close()
        assert answer.terminal == ["failed"] and answer.state.error.code == "too_many_deliveries"
        assert letter is not None and info is not None and info["state"]["messages"] == 0
    finally:
        stack.stop()


async def test_a_cancel_that_meets_the_router_half_way_cancels(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is accepted after the cancel has found no log of it."""
    await Client(bus, "t").submit(completion("k"), model=MODEL, request="r1")
    log, info = RequestLog(bus), bus.stream_info

    async def meanwhile_accepted(stream: str, subject: str = "") -> dict[str, Any] | None:
        found = await info(stream, subject)
        await log.append("t", "r1", None, first_state("accepted"))
        return found

    monkeypatch.setattr(bus, "stream_info", meanwhile_accepted)
    state = await Endpoints(bus, Endings(bus, Metrics([MODEL]))).cancel("t", "r1")
    assert state is not None and state.event == "cancelled"
    newest = await log.current("t", "r1")
    assert newest is not None and newest.state.event == "cancelled"


async def limit_log(bus: Bus, max_bytes: int) -> None:
    """A log that refuses every write, as on a full disk; or one that takes them again."""
    info = await bus.stream_info(subjects.LOG)
    assert info is not None
    await bus.api(f"STREAM.UPDATE.{subjects.LOG}", info["config"] | {"max_bytes": max_bytes})


async def test_a_log_that_cannot_be_written_for_a_while_costs_no_request(tmp_path: Path) -> None:
    """Each try counts towards the deliveries after which the broker gives up: they must not be used up in seconds."""
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=2.0, max_deliver=4))
    try:
        router = stack.add("pdq_router")
        await stack.start()
        bus = await stack.connect()
        worker = stack.add("pdq_worker")

        async def fill(answer: Answer) -> None:
            while answer.story[-1:] != ["routed"]:
                await asyncio.sleep(0.01)
            await limit_log(bus, 1)
            worker.start()
            worker.wait_ready()
            async with asyncio.timeout(30):
                while stack.metric(worker, "pdq_redeliveries_total") < 2:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(1.5)
            await limit_log(bus, 1 << 30)

        body = completion("k" * 20, max_tokens=5)
        answer = await follow(Client(bus, "t"), body, fill, order="decode-only")
        await bus.close()
        assert answer.terminal == ["finished"], router.log.read_text()[-2000:]
    finally:
        stack.stop()


async def test_a_deadline_that_comes_while_the_log_cannot_be_written_ends_its_request_later(tmp_path: Path) -> None:
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=2.0, max_deliver=2))
    try:
        stack.add("pdq_router")
        await stack.start()
        bus = await stack.connect()

        async def fill(answer: Answer) -> None:
            while answer.story[-1:] != ["routed"]:
                await asyncio.sleep(0.01)
            await limit_log(bus, 1)
            async with asyncio.timeout(30):
                while True:
                    info = await bus.consumer_info(subjects.REAP, subjects.REAPER_CONSUMER)
                    if info is not None and info["delivered"]["consumer_seq"] >= 3:
                        break
                    await asyncio.sleep(0.05)
            await limit_log(bus, 1 << 30)

        answer = await follow(Client(bus, "t"), completion("k"), fill, deadline_s=1.0)
        await bus.close()
        assert answer.story == ["accepted", "routed", "expired"]
    finally:
        stack.stop()


async def test_a_worker_that_loses_the_broker_while_its_engine_starts_becomes_ready(stack: Stack) -> None:
    await stack.start()
    proxy = Proxy(stack.broker.port)
    await proxy.start()
    worker = stack.add("pdq_decode", PDQ_NATS_URL=proxy.url, PDQ_ENGINE_SIM_FAULTS="store.delay_s=2")
    worker.start()
    async with asyncio.timeout(20):
        # Connected, and busy with its engine.
        while '"broker": {"ok": true' not in (await asyncio.to_thread(worker.get, "/readyz"))[1]:
            await asyncio.sleep(0.02)
    proxy.cut()
    await asyncio.sleep(7)
    proxy.heal()
    await asyncio.to_thread(worker.wait_ready)
    assert await asyncio.to_thread(worker.stop) == 0
    await proxy.close()
