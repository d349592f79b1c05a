"""A purge: what is stored of a request goes, wherever it is; nothing comes back; nobody else's is touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.log import RequestLog, first
from pdq.messages import CancelReply, Output, PurgeReply, ReadPage, decode_json, encode_json
from pdq.settings import LimitSettings

from tests.ask import ask, follow_to_end, read_all
from tests.stack import MODEL, Service, Stack, completion

LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)
SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100"}
LONG = completion("k" * 100, max_tokens=400, ignore_eos=True, temperature=0)
SHORT = completion("k" * 100, max_tokens=8, temperature=0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LIMITS)
    yield stack
    stack.stop()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20) -> None:
    give_up = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def left(bus: Bus, tenant: str, request: str) -> dict[str, int]:
    """Messages that name a request, by stream; those of the sweep's timer, which is empty, apart."""
    filters = {
        subjects.LOG: subjects.log_of(tenant, request),
        subjects.PREFILL: subjects.any_job("prefill", tenant, request),
        subjects.DECODE: subjects.any_job("decode", tenant, request),
        subjects.DEAD: subjects.any_dead(tenant, request),
    }
    found = {}
    for stream, where in filters.items():
        info = await bus.stream_info(stream, where)
        assert info is not None
        found[stream] = sum((info["state"].get("subjects") or {}).values())
    return {stream: number for stream, number in found.items() if number}


def on_disk(stack: Stack, stream: str) -> bytes:
    """What the blocks of a stream hold, removed messages that were not overwritten included."""
    return b"".join(
        block.read_bytes() for block in stack.broker.directory.glob(f"store/jetstream/*/streams/{stream}/msgs/*.blk")
    )


async def waiting(bus: Bus) -> int:
    info = await bus.stream_info(subjects.SUBMIT)
    assert info is not None
    return int(info["state"]["messages"])


async def started(client: Client, request: str, num_tokens: int = 10) -> None:
    """Return once an answer has so many tokens."""

    async def has_tokens() -> bool:
        return len((await read_all(client, request)).transcript.ids) >= num_tokens

    await until(has_tokens)


async def pause(bus: Bus, *, over: bool = False) -> None:
    """No submit is given to a router until it is `over`."""
    until_s = 0 if over else time.time() + 3600
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(until_s))
    await bus.api(f"CONSUMER.PAUSE.{subjects.SUBMIT}.{subjects.ROUTER_CONSUMER}", {"pause_until": stamp})


async def test_an_answer_is_purged_and_nobody_elses_is(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    mine, other = Client(bus, "mine"), Client(bus, "other")
    names = [new_request_id() for _ in range(3)]
    for name in names:
        for client in (mine, other):
            await ask(client, SHORT, request=name)
    before = await read_all(other, names[0])
    reply = await mine.purge(names[0])
    assert (reply.event, reply.error) == ("finished", None)
    assert reply.removed.events == len(before.events) and reply.removed.total == reply.removed.events
    assert await left(bus, "mine", names[0]) == {}
    assert b"mine." + names[0].encode() not in on_disk(stack, subjects.LOG)
    assert b"mine." + names[1].encode() in on_disk(stack, subjects.LOG)
    assert await mine.state(names[0]) is None and (await mine.read(names[0])).events == ()
    # The control: all of its neighbours' is there, the other tenant's of the very same name too.
    assert (await read_all(other, names[0])).events == before.events
    assert (await read_all(mine, names[1])).terminal == ["finished"]
    again = await mine.purge(names[0])
    assert again.error is not None and again.error.code == "not_found" and again.removed.total == 0
    await bus.close()


async def test_another_tenants_request_is_not_found_and_untouched(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_decode", **SLOW)
    await stack.start()
    bus = await stack.connect()
    mine, other = Client(bus, "mine"), Client(bus, "other")
    request = new_request_id()
    await other.submit(LONG, model=MODEL, request=request, order="decode-only")
    await started(other, request)
    reply = await mine.purge(request)
    assert reply.error is not None and reply.error.code == "not_found"
    answer = await follow_to_end(other, request)
    assert answer.terminal == ["finished"] and len(answer.transcript.ids) == 400
    # The control: who may, can.
    assert (await other.purge(request)).event == "finished"
    assert await left(bus, "other", request) == {}
    await bus.close()


PLACES = {
    "queued for prefill": ([("pdq_router", {})], 1),
    "in prefill": ([("pdq_router", {}), ("pdq_prefill", {"PDQ_ENGINE_SIM_FAULTS": "prefill.hang=1"})], 1),
    "queued for decode": ([("pdq_router", {}), ("pdq_prefill", {})], 1),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_request_is_purged_wherever_it_is(stack: Stack, place: str) -> None:
    modules, jobs = PLACES[place]
    services = [stack.add(module, **settings) for module, settings in modules]
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    await client.submit(LONG, model=MODEL, request=request, order="prefill-first")
    states = {"queued for prefill": "routed", "in prefill": "claim", "queued for decode": "prefilled"}

    async def there() -> bool:
        state = await client.state(request)
        return state is not None and state.event == states[place]

    await until(there)
    reply = await client.purge(request)
    assert (reply.event, reply.removed.jobs) == ("cancelled", jobs)
    assert await left(bus, "local", request) == {}
    # A worker that comes later finds nothing to do.
    late = stack.add("pdq_worker")
    late.start()
    await asyncio.to_thread(late.wait_ready)
    assert (await ask(client, SHORT, order="decode-only")).terminal == ["finished"]
    await until(lambda: idle(stack, services))
    assert await left(bus, "local", request) == {}
    await bus.close()


async def idle(stack: Stack, services: list[Service]) -> bool:
    return all(stack.metric(service, "pdq_worker_busy_slots") == 0 for service in services)


async def test_a_request_is_purged_while_it_is_decoded(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_decode", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    await client.submit(LONG, model=MODEL, request=request, order="decode-only")
    await started(client, request)
    async with client.follow(request) as follower:
        purging = asyncio.create_task(client.purge(request))
        # Whoever reads it meanwhile is told its end, or finds nothing; it does not wait for ever.
        async for event in follower.events(10):
            if event.state is not None and event.state.ended:
                assert event.state.event == "cancelled"
    assert (await purging).event == "cancelled"
    await until(lambda: idle(stack, [worker]))
    assert await left(bus, "local", request) == {}
    await bus.close()


async def test_a_worker_that_wakes_after_the_purge_leaves_nothing(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_decode", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    await client.submit(LONG, model=MODEL, request=request, order="decode-only")
    await started(client, request)
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    reply = await client.purge(request)
    assert (reply.event, reply.removed.jobs) == ("cancelled", 1)
    # Of its attempt's tokens some come late, as from one whose connection was slow.
    late = encode_json(Output.of(1, 400, [1], "secret"))
    await bus.publish(subjects.out("local", request), late)
    os.kill(worker.process.pid, signal.SIGCONT)
    await until(lambda: idle(stack, [worker]))

    async def gone() -> bool:
        return await left(bus, "local", request) == {}

    await until(gone)
    assert (await ask(client, SHORT)).terminal == ["finished"]
    assert await gone()
    await bus.close()


async def test_dead_letters_go_with_their_request(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill", PDQ_ENGINE_SIM_FAULTS="prefill.fail=1", PDQ_WORKER_MAX_ATTEMPTS="1")
    await stack.start()
    bus = await stack.connect()
    mine, other = Client(bus, "mine"), Client(bus, "other")
    request = new_request_id()
    for client in (mine, other):
        answer = await ask(client, SHORT, request=request, order="prefill-first")
        assert answer.terminal == ["failed"]
    reply = await mine.purge(request)
    assert (reply.event, reply.removed.dead_letters) == ("failed", 1)
    assert await left(bus, "mine", request) == {}
    assert (await left(bus, "other", request))[subjects.DEAD] == 1
    # The log may be gone before its letter is, which is kept for longer.
    await bus.purge(subjects.LOG, subjects.log_of("other", request))
    reply = await other.purge(request)
    assert (reply.event, reply.removed.dead_letters, reply.removed.events) == ("", 1, 0)
    assert await left(bus, "other", request) == {}
    await bus.close()


async def test_a_request_that_no_router_has_seen_is_purged_and_never_runs(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    mine, other = Client(bus, "mine"), Client(bus, "other")
    await pause(bus)
    # A pull that is open already may still be served.
    await ask(mine, SHORT) if await waiting(bus) else None
    request, neighbour = new_request_id(), new_request_id()
    for client in (mine, other):
        await client.submit(SHORT, model=MODEL, request=request)
    await mine.submit(SHORT, model=MODEL, request=neighbour)
    nameless = await mine.submit(SHORT, model=MODEL)
    assert await waiting(bus) == 4
    nobody = await mine.purge(new_request_id())
    assert nobody.error is not None and nobody.error.code == "not_found" and await waiting(bus) == 4
    theirs = await other.purge(nameless.request)
    assert theirs.error is not None and theirs.error.code == "not_found" and await waiting(bus) == 4
    for name in (request, nameless.request):
        reply = await mine.purge(name)
        assert (reply.event, reply.removed.submits, reply.error) == ("cancelled", 1, None)
        assert await left(bus, "mine", name) == {}
    assert await waiting(bus) == 2
    await pause(bus, over=True)
    assert (await follow_to_end(mine, neighbour)).terminal == ["finished"]
    assert (await follow_to_end(other, request)).terminal == ["finished"]
    assert await left(bus, "mine", request) == await left(bus, "mine", nameless.request) == {}
    await bus.close()


async def test_a_submit_that_was_cancelled_unseen_does_not_outlive_its_purge(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    await pause(bus)
    request = new_request_id()
    await client.submit(SHORT, model=MODEL, request=request)
    assert (await client.cancel(request)).state is not None
    reply = await client.purge(request)
    assert (reply.removed.submits, reply.removed.events) == (1, 1)
    await pause(bus, over=True)
    assert (await ask(client, SHORT)).terminal == ["finished"]
    assert await left(bus, "local", request) == {}
    await bus.close()


async def test_a_router_that_wakes_with_a_purged_submit_does_not_run_it(stack: Stack) -> None:
    asleep = stack.add("pdq_router", PDQ_ROUTER_SLOTS="1")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    assert asleep.process is not None
    os.kill(asleep.process.pid, signal.SIGSTOP)
    request = new_request_id()
    await client.submit(SHORT, model=MODEL, request=request)

    async def delivered() -> bool:
        info = await bus.consumer_info(subjects.SUBMIT, subjects.ROUTER_CONSUMER)
        return info is not None and bool(info["num_ack_pending"])

    await until(delivered)
    await pause(bus)
    awake = stack.add("pdq_router")
    awake.start()
    await asyncio.to_thread(awake.wait_ready)
    reply = PurgeReply()
    while not reply.event:
        # A request to the group may go to the one that is asleep.
        try:
            reply = await client.purge(request)
        except Exception:
            continue
    assert (reply.event, reply.removed.submits) == ("cancelled", 1)
    os.kill(asleep.process.pid, signal.SIGCONT)
    await pause(bus, over=True)
    assert (await ask(client, SHORT)).terminal == ["finished"]
    story = (await read_all(client, request)).story
    assert story in ([], ["cancelled"]), story
    assert set(await left(bus, "local", request)) <= {subjects.LOG}
    # The sweep, brought forward, takes what was left.
    await sweep_now(bus, "local", request)
    await bus.close()


async def sweep_now(bus: Bus, tenant: str, request: str) -> None:
    """Let the timer that a purge has set be due in a second, and wait until all is gone."""
    timer = await bus.last(subjects.REAP, subjects.timer(tenant, request))
    assert timer is not None and timer.data == b""
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 1))
    headers = {"Nats-Schedule": f"@at {moment}", "Nats-Schedule-Target": subjects.due(tenant, request)}
    await bus.publish(subjects.timer(tenant, request), b"", headers=headers)

    async def swept() -> bool:
        timers = await bus.stream_info(subjects.REAP, f"pdq.reap.*.{tenant}.{request}")
        assert timers is not None
        return await left(bus, tenant, request) == {} and not timers["state"].get("subjects")

    await until(swept)


async def test_what_is_written_after_a_purge_is_swept_up(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, SHORT)
    assert (await client.purge(answer.request)).event == "finished"
    # As by a worker that was killed right after it had written it.
    await bus.publish(subjects.out("local", answer.request), encode_json(Output.of(1, 0, [1], "secret")))
    await bus.publish(subjects.dead("decode", MODEL, "local", answer.request), b"{}")
    assert await client.state(answer.request) is None
    assert len(await left(bus, "local", answer.request)) == 2
    await sweep_now(bus, "local", answer.request)
    await bus.close()


async def test_a_name_can_be_used_again(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    for body in (SHORT, completion("another", max_tokens=4)):
        answer = await ask(client, body, request=request)
        assert answer.terminal == ["finished"]
        assert (await client.purge(request)).event == "finished"
    await bus.close()


async def test_a_name_that_stands_for_many_is_refused(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answers = [await ask(client, SHORT) for _ in range(2)]
    for subject in ("pdq.purge.local.*", f"pdq.purge.*.{answers[0].request}", "pdq.purge.*.*"):
        reply = decode_json(await bus.request(subject, b"", timeout_s=5), PurgeReply)
        assert reply.error is not None and reply.error.code == "invalid_request_id"
    cancelled = decode_json(await bus.request("pdq.cancel.local.*", b"", timeout_s=5), CancelReply)
    page = decode_json(await bus.request("pdq.read.*.*", b"", timeout_s=5), ReadPage)
    for error in (cancelled.error, page.error):
        assert error is not None and error.code == "invalid_request_id"
    assert page.events == ()
    for answer in answers:
        assert (await read_all(client, answer.request)).events == answer.events
    await bus.close()


async def test_the_log_of_a_purged_request_refuses_who_knew_it(bus: Bus) -> None:
    log = RequestLog(bus)
    entry = await log.append("t", "r1", None, first("accepted", submit_seq=1))
    await bus.purge(subjects.LOG, subjects.log_of("t", "r1"))
    seen: list[Any] = []

    def change(newest: Any) -> Any:
        seen.append(newest)
        return first("failed") if newest is not None else None

    assert await log.update("t", "r1", change, known=entry) is None
    assert seen == [entry, None] and await left(bus, "t", "r1") == {}


def purge_command(stack: Stack, request: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PDQ_NATS_URL": stack.url, "PDQ_HOME": str(stack.directory / "home")}
    command = [sys.executable, "-m", "pdq", "purge", request, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


async def test_the_command_says_what_it_removed(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    first_one, second = [await ask(client, SHORT) for _ in range(2)]
    done = await asyncio.to_thread(purge_command, stack, first_one.request)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"removed {len(first_one.events)} events\n"
    again = await asyncio.to_thread(purge_command, stack, first_one.request)
    assert again.returncode == 2 and again.stderr.startswith("pdq: not_found: ")
    told = await asyncio.to_thread(purge_command, stack, second.request, "--json")
    removed = {"submits": 0, "jobs": 0, "dead_letters": 0, "events": len(second.events)}
    assert json.loads(told.stdout) == {"id": second.request, "event": "finished", "removed": removed}
    await bus.close()
