"""At the limits: a client that reads nothing, long prompts, full queues, a flood."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.client import Client, new_request_id
from pdq.errors import QueueFull
from pdq.log import RequestLog, Transcript, first, follow
from pdq.messages import Output, StageClaims, State, decode_json, encode_json, pack_ids
from pdq.settings import LimitSettings

from tests.ask import Answer, ask, follow_to_end, read_all, submit_command
from tests.broker import Broker
from tests.memory import MOST_GROWTH_BYTES, grown, memories, memory
from tests.stack import MODEL, Stack, completion


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=2.0))
    yield stack
    stack.stop()


# ---- a client that reads nothing

LONG = {"max_tokens": 3500, "ignore_eos": True, "temperature": 0, "logprobs": 5}
"""An answer of about 1.5 MB of records."""


def deaf(broker: Broker) -> socket.socket:
    """A subscriber to every live event, which never reads again from its small socket."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(5)
    sock.connect(("127.0.0.1", broker.port))
    sock.sendall(b'CONNECT {"verbose":false,"name":"deaf"}\r\nSUB pdq.live.> 1\r\nPING\r\n')
    while b"PONG" not in sock.recv(4096):
        pass
    return sock


async def test_a_client_that_reads_nothing_is_cut_off_and_costs_nobody_else(stack: Stack) -> None:
    stack.broker.more = 'write_deadline: "2s"\n'
    stack.add("pdq_router")
    worker = stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    reference = await ask(client, completion("k" * 100, **LONG))
    before = memories(stack)
    with contextlib.closing(deaf(stack.broker)):
        answers = [await ask(client, completion("k" * 100, **LONG)) for _ in range(12)]
        await until(lambda: "Slow Consumer" in (stack.broker.directory / "nats.log").read_text())
        answers.append(await ask(client, completion("k" * 100, **LONG)))
    after = memories(stack)
    await bus.close()
    assert all(answer.terminal == ["finished"] and answer.state.decode.attempt == 1 for answer in answers)
    assert all(answer.transcript.ids == reference.transcript.ids for answer in answers)
    assert stack.metric(worker, "pdq_redeliveries_total") == 0
    assert grown(before, after) == {}


TEXT = "x" * 500_000


async def store_answer(bus: Bus, request: str, num_records: int) -> None:
    """The log of a request with one token a record, and much text in each."""
    log = RequestLog(bus)
    accepted = await log.append("local", request, None, first("accepted"))
    claim = follow(accepted.state, "claim", decode=StageClaims(attempt=1, owner="nobody"))
    claimed = await log.append("local", request, accepted, claim)
    for index in range(num_records):
        await bus.publish(subjects.out("local", request), encode_json(Output.of(1, index, [index], TEXT)))
    digest = hashlib.sha256(pack_ids(range(num_records))).hexdigest()
    end = follow(claim, "finished", num_tokens=num_records, output_digest=digest)
    await log.append("local", request, claimed, end)


READER = """
import asyncio, sys
from pdq.bus import Bus, Stored
from pdq.client import Client
from pdq.settings import BusSettings
from pdq.log import Transcript

async def main(url, request):
    bus = await Bus.connect(BusSettings(url=url), "reader")
    answer = Transcript()
    async with Client(bus, "local").follow(request) as follower:
        print("ready", flush=True)
        async for event in follower.events(120):
            answer.feed(event)
    print(bus.reconnects, answer.complete(), answer.digest(), flush=True)
    await bus.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_reader_that_stands_still_is_cut_off_and_misses_nothing(stack: Stack) -> None:
    stack.broker.more = 'write_deadline: "2s"\n'
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READER, stack.url, request), env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert reader.stdout is not None
    try:
        assert await asyncio.wait_for(reader.stdout.readline(), 20) == b"ready\n"
        os.kill(reader.pid, signal.SIGSTOP)
        await store_answer(bus, request, num_records=60)
        await until(lambda: "Slow Consumer" in (stack.broker.directory / "nats.log").read_text())
        os.kill(reader.pid, signal.SIGCONT)
        said = (await asyncio.wait_for(reader.stdout.readline(), 60)).split()
    finally:
        with contextlib.suppress(ProcessLookupError):
            reader.kill()
        await reader.wait()
    whole = await read_all(client, request)
    await bus.close()
    assert said == [b"1", b"True", whole.transcript.digest().encode()]


async def test_a_follower_that_nobody_asks_holds_little_and_misses_nothing(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    bus, other = await stack.connect(), await stack.connect()
    client = Client(bus, "local")
    idle, quick = new_request_id(), new_request_id()
    async with client.follow(idle, catch_up=False) as follower:
        before = memory(os.getpid())
        await store_answer(other, idle, num_records=140)
        await store_answer(other, quick, num_records=1)
        async with client.follow(quick) as reader:
            assert [event.seq async for event in reader.events(20)]
        # All live events of `idle` have come over this connection by now.
        growth = memory(os.getpid()) - before
        answer = Transcript()
        async for event in follower.events(60):
            answer.feed(event)
    await bus.close()
    await other.close()
    assert growth < MOST_GROWTH_BYTES < 140 * len(TEXT)
    assert answer.complete() and len(answer.ids) == 140


# ---- a long prompt, and a short one behind it


@pytest.mark.parametrize("order", ["prefill-first", "decode-only"])
async def test_a_short_prompt_behind_a_long_one_does_not_wait_for_its_end(stack: Stack, order: str) -> None:
    """One worker with several slots. What is stored first has the lower sequence: no clock is asked."""
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        # About 4 s for the long prompt, in 8 steps alone.
        stack.add(module, PDQ_ENGINE_SIM_PROFILE="llama2-70b-h100-tp8*10")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    long, short = new_request_id(), new_request_id()
    async with client.follow(long, catch_up=False) as follower:
        await client.submit(completion("l" * 4000, max_tokens=1), model=MODEL, request=long, order=order)
        answer = Answer(long)
        async for event in follower.events(60):
            answer.take(event)
            if answer.story[-1] == "claim":
                break
        second = await ask(client, completion("s" * 100, max_tokens=1), request=short, order=order)
        async for event in follower.events(60):
            answer.take(event)
    await bus.close()
    assert answer.terminal == second.terminal == ["finished"]
    assert computed(second, order) < computed(answer, order)


def computed(answer: Answer, order: str) -> int:
    """Where in the log a request's prompt is known to be computed."""
    if order == "prefill-first":
        return next(event.seq for event in answer.events if event.state and event.state.event == "prefilled")
    return next(event.seq for event in answer.events if event.out)


# ---- full queues, and priorities


async def test_a_full_submit_queue_refuses_at_the_publish_and_takes_more_once_it_has_room(tmp_path: Path) -> None:
    stack = Stack(tmp_path, limits=LimitSettings(submit_per_subject=5))
    try:
        router, worker = stack.add("pdq_router"), stack.add("pdq_worker")
        stack.services.clear()
        await stack.start()
        bus = await stack.connect()
        client, other = Client(bus, "local"), Client(bus, "other")
        body = completion("k" * 100, max_tokens=3)
        accepted = [(await client.submit(body, model=MODEL)).request for _ in range(5)]
        with pytest.raises(QueueFull, match="pdq.submit.local.sim.* try again in 1 s") as refused:
            await client.submit(body, model=MODEL)
        assert refused.value.per_subject
        code, said = await asyncio.to_thread(submit_command, stack)
        assert code == 4 and "queue_full" in said
        others = (await other.submit(body, model=MODEL)).request
        stack.services += [router, worker]
        router.start()
        worker.start()
        for whose, request in (*((client, request) for request in accepted), (other, others)):
            assert (await follow_to_end(whose, request)).terminal == ["finished"]
        assert (await ask(client, body)).terminal == ["finished"]
        await bus.close()
    finally:
        stack.stop()


async def test_a_stage_queue_at_its_limit_refuses_and_takes_more_once_it_has_room(tmp_path: Path) -> None:
    stack = Stack(tmp_path, limits=LimitSettings(queue_max_msgs=2))
    try:
        stack.add("pdq_router")
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        body = completion("k" * 100, max_tokens=3)
        # Decode's queue has twice the room.
        waiting = [asyncio.create_task(ask(client, body)) for _ in range(4)]
        await until_queued(bus, subjects.DECODE, 4)
        refused = await ask(client, body)
        assert refused.terminal == ["failed"] and refused.state.error.code == "queue_full"
        assert refused.state.error.retry_after_s >= 1 and "queue is full" in refused.state.error.message
        stack.add("pdq_worker").start()
        assert [answer.terminal for answer in await asyncio.gather(*waiting)] == [["finished"]] * 4
        assert (await ask(client, body)).terminal == ["finished"]
        await bus.close()
    finally:
        stack.stop()


async def until_queued(bus: Bus, stream: str, number: int) -> None:
    async with asyncio.timeout(20):
        while (info := await bus.stream_info(stream)) is None or info["state"]["messages"] < number:
            await asyncio.sleep(0.05)


async def test_a_flood_of_urgent_requests_starves_no_other_priority(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    body = completion("k" * 20, max_tokens=2)
    wanted = ["high"] * 40 + ["normal"] * 5 + ["low"] * 5
    for priority in wanted:
        await client.submit(body, model=MODEL, request=f"{priority}-{secrets.token_hex(4)}", priority=priority)
    await until_queued(bus, subjects.DECODE, len(wanted))
    stack.add("pdq_worker", PDQ_WORKER_SLOTS="1").start()
    await until_ended(bus, len(wanted))
    turns = [record.subject.split(".")[3].split("-")[0] for record in await states(bus, "finished")]
    await bus.close()
    assert sorted(turns) == sorted(wanted)
    first = turns[:14]
    assert first.count("high") > first.count("normal") > first.count("low") > 0
    assert turns[0] == "high" and turns[-5:] == ["high"] * 5


async def test_a_full_low_priority_holds_up_no_other_and_takes_more_once_it_has_room(stack: Stack) -> None:
    stack.add("pdq_router", PDQ_ROUTER_QUEUE_LIMIT="3")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    body = completion("k" * 20, max_tokens=2)
    waiting = [asyncio.create_task(ask(client, body, priority="low")) for _ in range(3)]
    await until_queued(bus, subjects.DECODE, 3)
    refused = await ask(client, body, priority="low")
    assert refused.terminal == ["failed"] and refused.state.error.code == "queue_full"
    assert "priority low" in refused.state.error.message and refused.state.error.retry_after_s >= 1
    waiting += [asyncio.create_task(ask(client, body, priority=priority)) for priority in ("high", "normal")]
    await until_queued(bus, subjects.DECODE, 5)
    stack.add("pdq_worker").start()
    assert [answer.terminal for answer in await asyncio.gather(*waiting)] == [["finished"]] * 5
    async with asyncio.timeout(10):  # what the router knows of a queue is half a second old at most
        while (await ask(client, body, priority="low")).terminal == ["failed"]:
            await asyncio.sleep(0.1)
    await bus.close()


async def states(bus: Bus, event: str) -> list[Stored]:
    """The records of an event of all requests, in the order of the log."""
    stored = await bus.read(subjects.LOG, "pdq.log.*.*.state", limit=1_000)
    return [record for record in stored if decode_json(record.data, State).event == event]


async def until_ended(bus: Bus, number: int) -> None:
    async with asyncio.timeout(60):
        while len(await states(bus, "finished")) < number:
            await asyncio.sleep(0.2)
