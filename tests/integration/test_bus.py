"""The bus against a real broker: compare-and-set, queues, pulls, counted publishing, restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from pdq import subjects
from pdq.bus import Bus, Outbox, Puller, identity
from pdq.bus.wire import Message
from pdq.errors import Misconfigured, QueueFull, Rejected, Unavailable, WrongSequence
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.broker import Broker
from tests.stack import MODEL


def job(request: str, priority: str = "normal") -> str:
    return subjects.job("prefill", MODEL, priority, "t", request)  # type: ignore[arg-type]


def puller(bus: Bus) -> Puller:
    return Puller(bus, subjects.PREFILL, [subjects.consumer(MODEL, p) for p in ("high", "normal", "low")])


async def test_init_twice_changes_nothing(bus: Bus, limits: LimitSettings) -> None:
    again = await init(bus, limits, [MODEL])
    assert set(again.values()) == {"unchanged"}
    assert len(again) == 8 + 2 + 8


async def test_init_brings_a_changed_limit_up_to_date(bus: Bus) -> None:
    done = await init(bus, LimitSettings(queue_max_msgs=77), [MODEL])
    assert {name for name, what in done.items() if what != "unchanged"} == {"PDQ_PREFILL", "PDQ_DECODE"}
    info = await bus.stream_info(subjects.PREFILL)
    assert info is not None and info["config"]["max_msgs"] == 77


async def test_a_missing_consumer_names_the_command(bus: Bus) -> None:
    with pytest.raises(Misconfigured, match="pdq init"):
        await bus.check_consumers([(subjects.PREFILL, "nobody-high")])


async def test_compare_and_set_refuses_the_second_writer(bus: Bus) -> None:
    subject = subjects.state("t", "r1")
    first = await bus.publish(subject, b"{}", expect_last=0)
    with pytest.raises(WrongSequence):
        await bus.publish(subject, b"{}", expect_last=0)
    second = await bus.publish(subject, b"{}", expect_last=first.seq)
    last = await bus.last(subjects.LOG, subject)
    assert last is not None and last.seq == second.seq


async def test_last_of_nothing_is_none(bus: Bus) -> None:
    assert await bus.last(subjects.LOG, subjects.state("t", "nobody")) is None


async def test_read_pages_in_stream_order(bus: Bus) -> None:
    for number in range(7):
        await bus.publish(subjects.out("t", "r1"), str(number).encode())
        await bus.publish(subjects.out("t", "r2"), b"another request's")
    first = await bus.read(subjects.LOG, subjects.log_of("t", "r1"), limit=4)
    rest = await bus.read(subjects.LOG, subjects.log_of("t", "r1"), after=first[-1].seq, limit=100)
    assert [stored.data for stored in first + rest] == [str(number).encode() for number in range(7)]
    assert await bus.read(subjects.LOG, subjects.log_of("t", "r1"), after=rest[-1].seq) == []


async def test_a_job_is_queued_once(bus: Bus) -> None:
    first = await bus.publish(job("r1"), b"a", msg_id="r1:prefill")
    again = await bus.publish(job("r1"), b"a", msg_id="r1:prefill")
    assert again.duplicate and again.seq == first.seq
    with pytest.raises(QueueFull) as refused:
        await bus.publish(job("r1"), b"b", msg_id="another")
    assert refused.value.per_subject


async def test_a_payload_over_the_limit_is_refused_with_the_limit(bus: Bus) -> None:
    with pytest.raises(Rejected, match=str(bus.max_payload)):
        await bus.publish(job("r1"), b"x" * (bus.max_payload + 1))


async def test_pull_takes_the_urgent_first_but_starves_nobody(bus: Bus) -> None:
    for number in range(20):
        await bus.publish(job(f"low{number}", "low"), b"")
        await bus.publish(job(f"high{number}", "high"), b"")
    pull = puller(bus)
    taken = []
    for _ in range(14):
        delivery = await asyncio.wait_for(pull.get(), 5)
        taken.append(subjects.parse_job(delivery.subject).priority)
        await delivery.ack()
    await pull.close()
    assert taken.count("high") > taken.count("low") > 0
    assert taken[0] == "high"


async def test_waiting_pull_gets_a_later_message_and_no_more_than_one(bus: Bus) -> None:
    pull = puller(bus)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.2)
    await bus.publish(job("r1", "high"), b"")
    await bus.publish(job("r2", "low"), b"")
    first = await asyncio.wait_for(waiting, 5)
    second = await asyncio.wait_for(pull.get(), 5)
    assert {subjects.parse_job(d.subject).request for d in (first, second)} == {"r1", "r2"}
    await first.ack()
    await second.ack()
    await pull.close()


async def test_who_waits_asks_once_for_each_message(bus: Bus) -> None:
    pull, asked = puller(bus), []

    def count(message: Message) -> None:
        asked.append(message.subject)

    await bus.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.PREFILL}.*", count)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.3)
    asked.clear()
    for number in range(10):
        await bus.publish(job(f"r{number}"), b"")
        delivery = await asyncio.wait_for(waiting, 5)
        waiting = asyncio.create_task(pull.get())
        await delivery.ack()
        assert (subjects.parse_job(delivery.subject).request, delivery.num_delivered) == (f"r{number}", 1)
    # The last `get` has yet to begin.
    await asyncio.sleep(0)
    await bus.flush()
    # A process that stands still for a moment asks anew, with six pulls: not each time.
    assert 10 <= len(asked) < 30
    waiting.cancel()
    await pull.close()


async def test_who_asks_no_more_leaves_messages_to_others(bus: Bus) -> None:
    busy = puller(bus)
    waiting = asyncio.create_task(busy.get())
    await asyncio.sleep(0.2)
    await bus.publish(job("r1", "normal"), b"")
    await (await asyncio.wait_for(waiting, 5)).ack()
    busy.rest()
    await bus.flush()
    for priority in ("high", "normal", "low"):
        await bus.publish(job(f"r-{priority}", priority), b"")
    other = puller(bus)
    for _ in range(3):
        delivery = await asyncio.wait_for(other.get(), 5)
        assert delivery.num_delivered == 1
        await delivery.ack()
    await other.close()
    await busy.close()


async def test_messages_that_come_together_are_all_handed_out(bus: Bus) -> None:
    pull = puller(bus)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.2)
    for priority in ("low", "normal", "high"):
        await bus.send(job(f"r-{priority}", priority), b"")
    deliveries = [await asyncio.wait_for(waiting, 5)]
    deliveries += [await asyncio.wait_for(pull.get(), 5) for _ in range(2)]
    assert {subjects.parse_job(delivery.subject).priority for delivery in deliveries} == {"high", "normal", "low"}
    await pull.close()


async def test_a_cancelled_pull_holds_nothing(bus: Bus) -> None:
    pull = puller(bus)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await pull.close()
    await bus.publish(job("r1"), b"")
    delivery = await asyncio.wait_for(puller(bus).get(), 5)
    assert delivery.num_delivered == 1


async def test_nak_with_a_delay_and_term(bus: Bus) -> None:
    await bus.publish(job("r1"), b"")
    pull = puller(bus)
    delivery = await asyncio.wait_for(pull.get(), 5)
    await delivery.nak(0.3)
    again = await asyncio.wait_for(pull.get(), 5)
    assert (again.num_delivered, again.seq) == (2, delivery.seq)
    await again.term("poison")
    await bus.flush()
    await until_empty(bus, subjects.PREFILL)
    await pull.close()


async def until_empty(bus: Bus, stream: str) -> None:
    """The server deletes a settled message a moment after it took the word."""
    async with asyncio.timeout(5):
        while (info := await bus.stream_info(stream)) is None or info["state"]["messages"]:
            await asyncio.sleep(0.02)


async def test_a_waiting_pull_survives_a_killed_broker(bus: Bus, broker: Broker) -> None:
    pull = puller(bus)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.2)
    broker.kill()
    await asyncio.sleep(0.5)
    broker.start()
    await bus.publish(job("r1"), b"")
    delivery = await asyncio.wait_for(waiting, 10)
    assert subjects.parse_job(delivery.subject).request == "r1"
    await delivery.ack()
    await pull.close()


async def test_publish_while_the_broker_is_away_fails_in_its_bound_and_runs_never(bus: Bus, broker: Broker) -> None:
    broker.kill()
    with pytest.raises(Unavailable, match="0.5 s"):
        await bus.publish(job("r1"), b"", timeout_s=0.5)
    broker.start()
    while not bus.connected:
        await asyncio.sleep(0.05)
    await bus.publish(job("r2"), b"")
    info = await bus.stream_info(subjects.PREFILL)
    assert info is not None and info["state"]["messages"] == 1


async def test_counted_publishing_loses_nothing_over_a_killed_broker(bus: Bus, broker: Broker) -> None:
    outbox = Outbox(bus)
    await outbox.start()
    channel = outbox.channel(subjects.out("t", "r1"))
    for number in range(300):
        await channel.send(str(number).encode())
        if number == 150:
            broker.kill()
        if number == 200:
            broker.start()
    await channel.flush(20)
    await outbox.close()
    stored = await bus.read(subjects.LOG, subjects.out("t", "r1"), limit=1000)
    assert {int(s.data) for s in stored} == set(range(300))


async def test_a_full_log_is_an_error_not_a_silence(broker: Broker) -> None:
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    await init(bus, LimitSettings(log_max_bytes=20_000), [MODEL])
    outbox = Outbox(bus)
    await outbox.start()
    channel = outbox.channel(subjects.out("t", "r1"))
    with pytest.raises(QueueFull):
        for _ in range(100):
            await channel.send(b"x" * 1000)
        await channel.flush(5)
    await outbox.close()
    await bus.close()


async def test_connect_says_where_nobody_answers() -> None:
    with pytest.raises(Unavailable, match="127.0.0.1:9"):
        await Bus.connect(BusSettings(url="nats://user:hunter2@127.0.0.1:9", connect_timeout_s=0.5), "test")


@pytest.mark.parametrize("verb", ["publish", "stream_info", "request"])
async def test_a_cancel_that_comes_with_the_answer_is_heeded(bus: Bus, verb: str) -> None:
    """A loop that takes the answer and forgets the cancel would go on for ever."""
    works: dict[str, Callable[[], Awaitable[object]]] = {
        "publish": lambda: bus.publish(subjects.due("t", "r"), b""),
        "stream_info": lambda: bus.stream_info(subjects.LOG),
        "request": lambda: bus.request("$JS.API.INFO", b"", timeout_s=5),
    }
    task = asyncio.ensure_future(works[verb]())
    ((sid, take),) = bus._nc._takes.items()

    def take_and_cancel(message: Message) -> None:
        bus._nc._takes[sid] = take
        take(message)
        task.cancel()

    bus._nc._takes[sid] = take_and_cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await bus.stream_info(subjects.LOG) is not None


async def test_headers_count_as_payload(bus: Bus) -> None:
    """What fits to the byte is stored; one more is refused here, as the server would close the connection for good."""
    headers = {"Pdq-Request": "r-1", "traceparent": "00-" + "1" * 50}
    around = len("NATS/1.0\r\nPdq-Request: r-1\r\ntraceparent: \r\n\r\n") + 53
    fits = b"x" * (bus.max_payload - around)
    assert (await bus.publish(subjects.submit("local", MODEL), fits, headers=headers)).seq
    with pytest.raises(Rejected, match=f"of {bus.max_payload + 1} bytes") as refused:
        await bus.publish(subjects.submit("local", MODEL), fits + b"x", headers=headers)
    assert refused.value.code == "payload_too_large"
    await bus.check()


async def test_a_subscription_that_is_cancelled_leaves_the_connection_whole(bus: Bus) -> None:
    """The pong of its flush comes when nobody waits any more, and must not end the client library's read loop."""

    def nothing(_: Message) -> None:
        raise AssertionError

    for turns in range(20):
        task = asyncio.create_task(bus.subscribe("pdq.live.t.r1.*", nothing))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(2):
            await bus.flush()


@pytest.mark.parametrize("trouble", [OSError("gone"), RuntimeError("changed"), asyncio.CancelledError()])
async def test_a_connection_that_cannot_be_closed_in_order_is_closed_all_the_same(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, trouble: BaseException
) -> None:
    """The client library's close may fail anywhere; whoever waits for the end must hear of it."""
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    whole = bus._nc.close

    async def close() -> None:
        raise trouble

    monkeypatch.setattr(bus._nc, "close", close)
    refused = Exception("nats: 'Authorization Violation'")
    monkeypatch.setattr(identity, "PATIENCE_S", 0.0)
    await bus._on_error(refused)
    await bus._on_error(refused)
    with pytest.raises(Unavailable, match="closed for good"):
        async with asyncio.timeout(10):
            await bus.watch(asyncio.Event())
    await whole()


async def test_a_listener_that_fails_ends_nothing(bus: Bus) -> None:
    heard: list[bytes] = []

    def take(message: Message) -> None:
        heard.append(message.data)
        raise RuntimeError("listener")

    await bus.subscribe("t.listener", take)
    for data in (b"1", b"2"):
        await bus.send("t.listener", data)
    await bus.flush()
    assert heard == [b"1", b"2"]
    assert await bus.stream_info(subjects.LOG) is not None


async def test_a_flush_comes_after_what_was_said_before_it(bus: Bus, broker: Broker) -> None:
    other, heard = await Bus.connect(BusSettings(url=broker.url), "other"), list[bytes]()
    await other.subscribe("t.flush", lambda message: heard.append(message.data))
    for number in range(100):
        await bus.send("t.flush", b"%d" % number)
        await bus.flush()
        await other.flush()
        assert len(heard) == number + 1
    await other.close()


def test_a_flush_over_a_connection_that_was_just_lost(broker: Broker) -> None:
    """uvloop refuses to write to it before the client library has noticed."""

    async def lose_and_flush() -> None:
        bus = await Bus.connect(BusSettings(url=broker.url), "test")
        for turns in range(4):
            bus._nc._transport.close()
            for _ in range(turns):
                await asyncio.sleep(0)
            with contextlib.suppress(Unavailable):
                await bus.flush()
            async with asyncio.timeout(10):
                while not bus.connected:
                    await asyncio.sleep(0.01)
        await bus.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lose_and_flush())
