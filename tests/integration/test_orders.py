"""Who goes first: decode-first with everything that can go wrong while decode waits, and what `auto` chooses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdq import operators, subjects, traces
from pdq.client import Client, new_request_id
from pdq.settings import LimitSettings

from tests.ask import Answer, ask, read_all
from tests.integration.test_faults import ask_while, settled
from tests.integration.test_lifecycle import empty, idle, until
from tests.integration.test_metrics import value
from tests.stack import MODEL, Service, Stack, completion

LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)
SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100"}
HANGS = {"PDQ_ENGINE_SIM_FAULTS": "prefill.hang=1"}
DELEGATED = ["accepted", "routed", "claim", "claim", "prefilled", "finished"]
PROMPT = "k" * 200


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LIMITS)
    yield stack
    stack.stop()


async def started(stack: Stack, prefill: dict[str, str] | None = None, **decode: str) -> tuple[Service, Service]:
    """Router, prefill and decode; returns the two workers."""
    stack.add("pdq_router")
    workers = stack.add("pdq_prefill", **(prefill or {})), stack.add("pdq_decode", **decode)
    await stack.start()
    return workers


def body(prompt: object = PROMPT, **fields: object) -> bytes:
    return completion(prompt, **{"max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields})


def ran(worker: Service, what: str) -> float:
    """How often a worker's engine began: `prefills_started`, `decodes_started`, ..."""
    return value(worker, "pdq_engine_stat", stat=what)


async def has_run(worker: Service, what: str, wanted: float) -> None:
    await settled(lambda: ran(worker, what) >= wanted)
    assert ran(worker, what) == wanted


def fell_back(service: Service, cause: str) -> float:
    """How often a service counted that decode computes in place of prefill."""
    return value(service, "pdq_order_fallbacks_total", cause=cause)


async def waits(answer: Answer) -> None:
    """Until decode waits for a prefill that has begun."""
    while answer.story[-2:] != ["claim", "claim"]:
        await asyncio.sleep(0.01)


# ---- when all goes well


async def test_decode_delegates_the_prefill_and_loads_what_it_made(stack: Stack) -> None:
    prefill, decode = await started(stack)
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, body(), order="decode-first")
    other = await ask(client, body("m" * 200), order="decode-only")
    plain = await ask(Client(bus, "another"), body(), order="decode-only")
    await bus.close()
    assert answer.story == DELEGATED
    state = answer.state
    assert (state.order, state.reason, state.local) == ("decode-first", "requested", "")
    assert (state.prefill.attempt, state.decode.attempt) == (1, 1)
    assert (state.kv.promised_tokens, state.kv.loaded_tokens) == (192, 192)
    assert state.promise.tokens == 192
    parts = {"decode_queue", "decode_kv_wait", "prefill_queue", "prefill", "prefill_kv_store", "decode_kv_load", "ttft"}
    assert parts <= set(state.timings_ms)
    assert other.state.kv.loaded_tokens == plain.state.kv.loaded_tokens == 0, "nothing but the delegation made it"
    assert answer.transcript.ids == plain.transcript.ids
    assert fell_back(decode, "late") == 0
    assert value(prefill, "pdq_handoffs_total", kv="ready") == 1


async def test_what_the_tiers_hold_is_not_delegated(stack: Stack) -> None:
    prefill, _ = await started(stack)
    bus = await stack.connect()
    client = Client(bus, "local")
    await ask(client, body(), order="prefill-first")
    whole = await ask(client, body(), order="decode-first")
    longer = await ask(client, body(PROMPT + "l" * 100), order="decode-first")
    rest = await ask(client, body(PROMPT + "l" * 10), order="decode-first")
    short = await ask(client, body("s" * 31), order="decode-first")
    chunk = await ask(client, body("c" * 32), order="decode-first")
    await bus.close()
    alone = ["accepted", "routed", "claim", "finished"]
    assert whole.story == alone and whole.state.kv.loaded_tokens == 192
    assert longer.story == DELEGATED and longer.state.kv.loaded_tokens == 288
    assert rest.story == alone and rest.state.kv.loaded_tokens == 192, "no whole chunk is missing"
    assert short.story == alone and short.state.kv.loaded_tokens == 0
    assert chunk.story == DELEGATED and chunk.state.kv.loaded_tokens == 31
    await has_run(prefill, "prefills_done", 3)
    assert ran(prefill, "tokens_loaded") == 192, "of the longer prompt only the missing part was computed"


async def test_fifty_at_once_and_one_worker_for_both_stages(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_worker", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    orders = ("decode-first", "prefill-first", "decode-only")
    asking = [
        ask(
            client,
            body(f"request number {i} " * 12),
            order=orders[i % 3],
            seconds=60,
            priority="high" if i % 2 else "low",
        )
        for i in range(50)
    ]
    answers = await asyncio.gather(*asking)
    await bus.close()
    assert all(answer.terminal == ["finished"] for answer in answers)
    delegated = [answer for answer in answers if answer.state.order == "decode-first"]
    assert all(a.state.kv.loaded_tokens == a.state.kv.promised_tokens > 0 for a in delegated)
    assert all((a.state.prefill.attempt, a.state.decode.attempt) == (1, 1) for a in delegated)
    await has_run(worker, "prefills_done", 34)


async def test_the_wait_is_a_span_and_the_prefill_is_below_it_in_the_same_trace(stack: Stack) -> None:
    await started(stack, **SLOW)
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), body(), order="decode-first")
    await bus.close()
    await asyncio.to_thread(stack.stop)
    (trace,) = traces.find(stack.directory, answer.request)
    assert trace.trace_id == answer.state.trace
    by_id = {span.span_id: span for span in trace.spans}
    parents = {span.name: by_id[span.parent_id].name for span in trace.spans if span.parent_id in by_id}
    assert parents["process decode"] == "route"
    assert parents["process prefill"] == "process decode"
    assert parents["kv.wait"] == "process decode"
    assert parents["engine.prefill"] == "process prefill"
    spans = {span.name: span for span in trace.spans}
    assert spans["kv.wait"].attributes["pdq.kv.tokens"] == 192
    assert spans["kv.wait"].start_ns <= spans["engine.prefill"].start_ns
    assert spans["kv.wait"].end_ns >= spans["engine.prefill"].end_ns
    told = spans["route"].attributes
    assert (told["pdq.order"], told["pdq.reason"]) == ("decode-first", "requested")
    assert told["pdq.order.prefill_workers"] == 1


# ---- when the prefill does not come


async def test_without_a_prefill_worker_decode_computes_and_says_so(stack: Stack) -> None:
    stack.add("pdq_router")
    decode = stack.add("pdq_decode")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, body(), order="decode-first")
    plain = await ask(client, body(), order="decode-only")
    await bus.close()
    assert answer.story == ["accepted", "routed", "claim", "local", "finished"]
    assert (answer.state.local, answer.state.kv.loaded_tokens) == ("no_prefill_worker", 0)
    assert answer.transcript.ids == plain.transcript.ids
    assert fell_back(decode, "no_prefill_worker") == 1
    assert await empty(stack, subjects.PREFILL)


async def test_a_late_prefill_is_not_waited_for(stack: Stack) -> None:
    stack.add("pdq_router", PDQ_ROUTER_PREFILL_WAIT_S="1")
    prefill, decode = stack.add("pdq_prefill", **HANGS), stack.add("pdq_decode")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, body(), order="decode-first")
    plain = await ask(client, body(), order="decode-only")
    await bus.close()
    assert answer.story == ["accepted", "routed", "claim", "claim", "local", "finished"]
    assert answer.state.local == "late" and answer.state.promise is None
    assert answer.state.timings_ms["decode_kv_wait"] >= 1_000
    assert (answer.state.kv.promised_tokens, answer.state.kv.loaded_tokens) == (0, 0)
    assert answer.transcript.ids == plain.transcript.ids
    assert fell_back(decode, "late") == 1
    # The prefill that hangs is stopped, and its job is gone.
    await until(lambda: idle(stack, [prefill, decode]))
    await until(lambda: empty(stack, subjects.PREFILL))
    await has_run(prefill, "prefills_started", 1)


async def test_a_prefill_job_that_nobody_took_is_taken_back(stack: Stack) -> None:
    stack.add("pdq_router", PDQ_ROUTER_PREFILL_WAIT_S="1")
    prefill = stack.add("pdq_prefill", PDQ_WORKER_SLOTS="1", **HANGS)
    stack.add("pdq_decode")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    # The only slot of prefill is taken by another request.
    busy = new_request_id()
    await client.submit(body("b" * 100), model=MODEL, request=busy, order="prefill-first")
    await until(lambda: busy_with(stack, prefill, 1))
    answer = await ask(client, body(), order="decode-first")
    assert answer.story == ["accepted", "routed", "claim", "local", "finished"]
    assert (answer.state.local, answer.state.prefill.attempt) == ("late", 0)
    await client.cancel(busy)
    await until(lambda: idle(stack, [prefill]))
    await until(lambda: empty(stack, subjects.PREFILL))
    await bus.close()
    await has_run(prefill, "prefills_started", 1)


async def busy_with(stack: Stack, service: Service, jobs: int) -> bool:
    return stack.metric(service, "pdq_worker_busy_slots") == jobs


async def test_a_prefill_that_fails_for_good_leaves_the_request_to_decode(stack: Stack) -> None:
    prefill, decode = await started(stack, {"PDQ_ENGINE_SIM_FAULTS": "prefill.fail=1"})
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, body(), order="decode-first")
    plain = await ask(client, body(), order="decode-only")
    assert answer.terminal == ["finished"] and answer.transcript.ids == plain.transcript.ids
    assert (answer.state.local, answer.state.prefill.attempt, answer.state.decode.attempt) == ("prefill_failed", 3, 1)
    assert answer.story.count("released") == 2 and "local" in answer.story
    assert fell_back(prefill, "prefill_failed") == 1
    assert fell_back(decode, "late") == 0
    # Its dead letter stays, and can be sent again the same way.
    (letter,) = await operators.dead_letters(bus)
    assert (letter.letter.stage, letter.letter.request) == ("prefill", answer.request)
    submitted = await operators.replay(bus, letter)
    async with client.follow(submitted.request) as follower:
        async for _ in follower.events(20):
            pass
    again = await read_all(client, submitted.request)
    await bus.close()
    assert (again.state.order, again.terminal) == ("decode-first", ["finished"])
    assert again.transcript.ids == answer.transcript.ids


async def test_a_prefill_that_loses_its_store_is_no_reason_to_wait(stack: Stack) -> None:
    prefill, decode = await started(stack, {"PDQ_ENGINE_SIM_FAULTS": "store.fail=1"})
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), body(), order="decode-first")
    await bus.close()
    assert answer.story == DELEGATED
    assert (answer.state.promise.tokens, answer.state.promise.cause) == (0, "store_failed")
    assert (answer.state.kv.promised_tokens, answer.state.kv.loaded_tokens) == (0, 0)
    assert value(prefill, "pdq_handoffs_total", kv="store_failed") == 1
    assert fell_back(decode, "late") == 0


async def test_a_prefill_worker_that_goes_is_not_waited_for(stack: Stack) -> None:
    prefill, decode = await started(stack, HANGS)
    bus = await stack.connect()

    async def kill(answer: Answer) -> None:
        await waits(answer)
        prefill.kill()

    answer = await ask_while(Client(bus, "local"), body(), kill, order="decode-first")
    await bus.close()
    assert (answer.terminal, answer.state.local) == (["finished"], "no_prefill_worker")
    assert answer.state.timings_ms["decode_kv_wait"] < 15_000, "its beats stopped, and that was enough"
    assert fell_back(decode, "no_prefill_worker") == 1


async def test_a_killed_prefill_worker_is_replaced_while_decode_waits(stack: Stack) -> None:
    prefill, _ = await started(stack, HANGS)
    bus = await stack.connect()
    replacement = stack.add("pdq_prefill")

    async def kill(answer: Answer) -> None:
        await waits(answer)
        replacement.start()
        await asyncio.to_thread(replacement.wait_ready)
        prefill.kill()

    answer = await ask_while(Client(bus, "local"), body(), kill, order="decode-first")
    await bus.close()
    assert answer.terminal == ["finished"] and answer.state.local == ""
    assert (answer.state.prefill.attempt, answer.state.prefill.failures, answer.state.decode.attempt) == (2, 1, 1)
    assert answer.state.kv.loaded_tokens == 192


async def test_a_drained_prefill_worker_gives_the_work_to_another(stack: Stack) -> None:
    prefill, _ = await started(stack, {**HANGS, "PDQ_WORKER_DRAIN_S": "0.2"})
    bus = await stack.connect()
    replacement = stack.add("pdq_prefill")

    async def drain(answer: Answer) -> None:
        await waits(answer)
        replacement.start()
        await asyncio.to_thread(replacement.wait_ready)
        assert await asyncio.to_thread(prefill.stop) == 0

    answer = await ask_while(Client(bus, "local"), body(), drain, order="decode-first")
    await bus.close()
    assert answer.terminal == ["finished"] and "released" in answer.story
    assert (answer.state.prefill.attempt, answer.state.prefill.failures) == (2, 0)
    assert answer.state.kv.loaded_tokens == 192


# ---- when decode goes


@pytest.mark.parametrize("how", ["killed", "drained"])
async def test_a_decode_worker_that_goes_while_it_waits_starts_no_second_prefill(stack: Stack, how: str) -> None:
    prefill, decode = await started(stack, {"PDQ_ENGINE_SIM_FAULTS": "prefill.delay_s=3"}, PDQ_WORKER_DRAIN_S="0.2")
    bus = await stack.connect()
    second = stack.add("pdq_decode")

    async def end(answer: Answer) -> None:
        await waits(answer)
        second.start()
        await asyncio.to_thread(second.wait_ready)
        if how == "killed":
            decode.kill()
        else:
            assert await asyncio.to_thread(decode.stop) == 0

    answer = await ask_while(Client(bus, "local"), body(), end, order="decode-first")
    assert answer.terminal == ["finished"]
    assert (answer.state.decode.attempt, answer.state.decode.failures) == (2, 1 if how == "killed" else 0)
    assert (answer.state.prefill.attempt, answer.state.kv.loaded_tokens) == (1, 192)
    await has_run(prefill, "prefills_started", 1)
    await has_run(second, "decodes_started", 1)
    await until(lambda: empty(stack, subjects.PREFILL))
    await bus.close()


async def test_what_was_prefilled_meanwhile_is_found_by_the_next_attempt(stack: Stack) -> None:
    prefill, decode = await started(stack, {"PDQ_ENGINE_SIM_FAULTS": "prefill.delay_s=1"})
    bus = await stack.connect()
    second = stack.add("pdq_decode")

    async def pause(answer: Answer) -> None:
        await waits(answer)
        assert decode.process is not None
        os.kill(decode.process.pid, signal.SIGSTOP)
        while "prefilled" not in answer.story:
            await asyncio.sleep(0.01)
        second.start()
        await asyncio.to_thread(second.wait_ready)
        decode.kill()

    answer = await ask_while(Client(bus, "local"), body(), pause, order="decode-first")
    assert answer.story == [*DELEGATED[:-1], "claim", "finished"]
    assert (answer.state.kv.promised_tokens, answer.state.kv.loaded_tokens) == (192, 192)
    await has_run(prefill, "prefills_started", 1)
    await bus.close()


async def test_a_decode_worker_killed_in_mid_answer_goes_on_with_the_same_promise(stack: Stack) -> None:
    prefill, decode = await started(stack, **SLOW)
    bus = await stack.connect()
    client = Client(bus, "local")
    second = stack.add("pdq_decode")

    async def kill(answer: Answer) -> None:
        while len(answer.transcript.ids) < 20:
            await asyncio.sleep(0.01)
        second.start()
        await asyncio.to_thread(second.wait_ready)
        decode.kill()

    long = body(max_tokens=400)
    answer = await ask_while(client, long, kill, order="decode-first")
    plain = await ask(client, long, order="decode-only")
    assert answer.terminal == ["finished"] and answer.state.decode.attempt == 2
    assert answer.transcript.ids == plain.transcript.ids
    assert (answer.state.prefill.attempt, answer.state.kv.promised_tokens) == (1, 192)
    await has_run(prefill, "prefills_started", 1)
    await bus.close()


async def test_waiting_is_progress(stack: Stack) -> None:
    _, decode = await started(stack, {"PDQ_ENGINE_SIM_FAULTS": "prefill.delay_s=4"}, PDQ_WORKER_STALL_S="2")
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), body(), order="decode-first")
    assert value(decode, "pdq_redeliveries_total", stage="decode") == 0
    # The control: an engine that is silent for so long is given up.
    slow = stack.add("pdq_decode", PDQ_WORKER_STALL_S="2", PDQ_ENGINE_SIM_FAULTS="decode.delay_s=4")
    await asyncio.to_thread(decode.stop)
    slow.start()
    await asyncio.to_thread(slow.wait_ready)
    stalled = Answer(new_request_id())
    async with Client(bus, "local").follow(stalled.request, catch_up=False) as follower:
        await Client(bus, "local").submit(body("s" * 40), model=MODEL, request=stalled.request, order="decode-only")
        async for event in follower.events(30):
            stalled.take(event)
            if "released" in stalled.story:
                break
    await Client(bus, "local").cancel(stalled.request)
    await bus.close()
    assert answer.story == DELEGATED and answer.state.timings_ms["decode_kv_wait"] > 3_500
    assert (answer.state.decode.attempt, answer.state.kv.loaded_tokens) == (1, 192)
    assert stalled.story[-1] == "released"


# ---- when the request ends meanwhile


@pytest.mark.parametrize("by", ["endpoint", "deadline"])
@pytest.mark.parametrize("place", ["for a prefill worker", "in the prefill"])
async def test_a_request_is_ended_while_decode_waits(stack: Stack, place: str, by: str) -> None:
    queued = place == "for a prefill worker"
    prefill, decode = await started(stack, {**HANGS, "PDQ_WORKER_SLOTS": "1"}, **SLOW)
    bus = await stack.connect()
    client = Client(bus, "local")
    busy = new_request_id()
    if queued:
        await client.submit(body("b" * 100), model=MODEL, request=busy, order="prefill-first")
        await until(lambda: busy_with(stack, prefill, 1))
    story = ["accepted", "routed", "claim"] if queued else ["accepted", "routed", "claim", "claim"]
    answer = Answer(new_request_id())
    options = {"order": "decode-first"} | ({"deadline_s": 2.0} if by == "deadline" else {})
    async with client.follow(answer.request, catch_up=False) as follower:
        await client.submit(body(), model=MODEL, request=answer.request, **options)  # type: ignore[arg-type]
        async for event in follower.events(30):
            answer.take(event)
            if by == "endpoint" and answer.story == story:
                await until(lambda: holds(stack, subjects.PREFILL, 2 if queued else 1))
                reply = await client.cancel(answer.request)
                assert reply.state is not None and reply.state.event == "cancelled"
    ended = "cancelled" if by == "endpoint" else "expired"
    assert answer.terminal == [ended]
    assert [event for event in answer.story if event != "cancelling"] == [*story, ended]
    assert (answer.state.num_tokens, answer.state.usage.completion_tokens) == (0, 0)
    await until(lambda: idle(stack, [decode]))
    if queued:
        await client.cancel(busy)
    for stream in (subjects.PREFILL, subjects.DECODE, subjects.REAP):
        await until(lambda stream=stream: empty(stack, stream))
    await until(lambda: idle(stack, [prefill]))
    await bus.close()
    await has_run(prefill, "prefills_started", 1)
    assert ran(decode, "decodes_started") == 0


async def holds(stack: Stack, stream: str, messages: int) -> bool:
    bus = await stack.connect()
    info = await bus.stream_info(stream)
    await bus.close()
    assert info is not None
    return int(info["state"]["messages"]) >= messages
