"""Cancels at every place, a router that dies, rolling restarts, keys: each request ends once, and as it should."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from pdq import subjects
from pdq.client import Client, idempotent_id, new_request_id
from pdq.settings import LimitSettings

from tests.ask import Answer, ask, read_all
from tests.stack import MODEL, Stack, completion

LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)
PATIENT = LimitSettings(ack_wait_s=10.0, worker_ttl_s=2.0)
"""Where a failure is counted: a worker that gets no CPU for longer than ack_wait loses what it has, which is one."""
SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100"}
PROMPT = completion("k" * 100, max_tokens=400, ignore_eos=True, temperature=0)


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


async def queued(client_stack: Stack, stream: str) -> int:
    bus = await client_stack.connect()
    info = await bus.stream_info(stream)
    await bus.close()
    assert info is not None
    return int(info["state"]["messages"])


PLACES = {
    "for prefill": ([("pdq_router", {})], ["accepted", "routed"]),
    "in prefill": (
        [("pdq_router", {}), ("pdq_prefill", {"PDQ_ENGINE_SIM_FAULTS": "prefill.hang=1"})],
        ["accepted", "routed", "claim"],
    ),
    "for decode": ([("pdq_router", {}), ("pdq_prefill", {})], ["accepted", "routed", "claim", "prefilled"]),
    "in decode": (
        [("pdq_router", {}), ("pdq_prefill", {}), ("pdq_decode", SLOW)],
        ["accepted", "routed", "claim", "prefilled", "claim"],
    ),
}


@pytest.mark.parametrize("by", ["endpoint", "deadline"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_request_is_ended_wherever_it_is(stack: Stack, place: str, by: str) -> None:
    modules, story = PLACES[place]
    services = [stack.add(module, **settings) for module, settings in modules]
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = Answer(new_request_id())
    options = {"order": "prefill-first"} | ({"deadline_s": 2.0} if by == "deadline" else {})
    async with client.follow(answer.request, catch_up=False) as follower:
        await client.submit(PROMPT, model=MODEL, request=answer.request, **options)  # type: ignore[arg-type]
        async for event in follower.events(30):
            answer.take(event)
            if by == "endpoint" and answer.story == story and not answer.terminal:
                reply = await client.cancel(answer.request)
                assert reply.state is not None and reply.state.event == "cancelled"
    await bus.close()
    ended = "cancelled" if by == "endpoint" else "expired"
    assert answer.terminal == [ended] and answer.state.finish_reason == ""
    assert [event for event in answer.story if event != "cancelling"] == [*story, ended]
    assert answer.transcript.complete() and len(answer.transcript.ids) < 400
    for stream in (subjects.PREFILL, subjects.DECODE, subjects.REAP):
        await until(lambda stream=stream: empty(stack, stream))
    await until(lambda: idle(stack, services))


async def empty(stack: Stack, stream: str) -> bool:
    return await queued(stack, stream) == 0


async def idle(stack: Stack, services: list) -> bool:  # type: ignore[type-arg]
    return all(stack.metric(service, "pdq_worker_busy_slots") == 0 for service in services)


async def test_a_request_that_no_router_has_seen_is_cancelled_before_it_runs(stack: Stack) -> None:
    busy = stack.add("pdq_router", PDQ_ROUTER_SLOTS="1")
    stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    busy.kill()
    await client.submit(PROMPT, model=MODEL, request=request)
    # A router that answers but does not route: the submit queue's consumer is paused.
    await bus.api(f"CONSUMER.PAUSE.{subjects.SUBMIT}.{subjects.ROUTER_CONSUMER}", {"pause_until": later()})
    busy.start()
    await asyncio.to_thread(busy.wait_ready)
    reply = await client.cancel(request)
    assert reply.state is not None and reply.state.event == "cancelled"
    await bus.api(f"CONSUMER.PAUSE.{subjects.SUBMIT}.{subjects.ROUTER_CONSUMER}", {})
    await until(lambda: empty(stack, subjects.SUBMIT))
    stored = await read_all(client, request)
    nobody = await client.cancel(new_request_id())
    await bus.close()
    assert stored.story == ["cancelled"]
    assert nobody.error is not None and nobody.error.code == "not_found"


def later() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))


async def test_a_killed_router_loses_nothing_and_routes_nothing_twice(stack: Stack) -> None:
    router = stack.add("pdq_router")
    worker = stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    bodies = [completion(f"request {i} " * 8, max_tokens=8, temperature=0) for i in range(40)]
    running = [asyncio.create_task(ask(client, body, seconds=60)) for body in bodies]
    await asyncio.sleep(0.1)
    router.kill()
    await asyncio.sleep(0.3)
    router.start()
    answers = await asyncio.gather(*running)
    await until(lambda: empty(stack, subjects.DECODE))
    await bus.close()
    assert all(answer.terminal == ["finished"] for answer in answers)
    assert all(answer.state.decode.attempt == 1 for answer in answers)
    assert stack.metric(worker, "pdq_dead_letters_total") == 0


async def test_a_rolling_restart_of_every_worker_four_times_over_fails_no_request(stack: Stack) -> None:
    stack.limits = PATIENT
    for module in ("pdq_router", "pdq_router", "pdq_prefill", "pdq_prefill", "pdq_decode", "pdq_decode"):
        stack.add(module, PDQ_WORKER_DRAIN_S="0.5", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    over = asyncio.Event()
    answers: list[Answer] = []

    async def load(number: int) -> None:
        body = completion(f"stream {number} " * 10, max_tokens=40, ignore_eos=True, temperature=0)
        while not over.is_set():
            answers.append(await ask(client, body, seconds=60))

    running = [asyncio.create_task(load(number)) for number in range(4)]
    for _ in range(4):
        for service in stack.services:
            assert await asyncio.to_thread(service.stop) == 0
            service.start()
            await asyncio.to_thread(service.wait_ready)
    over.set()
    await asyncio.gather(*running)
    await bus.close()
    assert len(answers) > 24
    assert all(answer.terminal == ["finished"] for answer in answers)
    assert all(answer.state.decode.failures == answer.state.prefill.failures == 0 for answer in answers)


async def test_an_idempotency_key_runs_once(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = idempotent_id("order 66, line 7 \u2026")
    body = completion("k" * 100, max_tokens=5)
    first = await ask(client, body, request=request)
    for _ in range(3):
        await client.submit(body, model=MODEL, request=request)
    await until(lambda: empty(stack, subjects.SUBMIT))
    again = await read_all(client, request)
    await bus.close()
    assert again.story == first.story and again.transcript.text == first.transcript.text
    assert stack.metric(worker, "pdq_requests_total") == 1
