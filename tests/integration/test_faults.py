"""What happens when something dies, stops, hangs or is told to: one end each, no token lost or repeated."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pdq import operators, subjects
from pdq.client import Client, new_request_id
from pdq.errors import Rejected, Unavailable
from pdq.messages import (
    DeadLetter,
    DecodeJob,
    PrefillJob,
    Sampling,
    decode_job,
    decode_json,
    encode_job,
    pack_ids,
)
from pdq.settings import LimitSettings
from pdq_router.admission import FRESH_S

from tests.ask import Answer, ask, follow_to_end, read_all
from tests.stack import MODEL, Service, Stack, completion

SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama2-70b-h100-tp8"}
"""About 30 ms a token."""
LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LIMITS)
    yield stack
    stack.stop()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0, "logprobs": 2},
    ],
    ids=["continue", "replay", "replay-seeded", "continue-logprobs"],
)
async def test_a_killed_decode_worker_is_replaced_in_mid_answer(stack: Stack, fields: dict[str, object]) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    first = stack.add("pdq_decode", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    body = completion("k" * 100, max_tokens=60, ignore_eos=True, **fields)
    second = stack.add("pdq_decode")

    async def kill(answer: Answer) -> None:
        while len(answer.transcript.ids) < 20:
            await asyncio.sleep(0.01)
        first.kill()
        second.start()
        second.wait_ready()

    answer = await ask_while(client, body, kill)
    reference = await ask(client, body, order="decode-only")
    await bus.close()
    assert answer.terminal == ["finished"] and answer.state.decode.attempt == 2
    assert {event.out.attempt for event in answer.events if event.out is not None} == {1, 2}
    assert (answer.transcript.ids, answer.transcript.text) == (reference.transcript.ids, reference.transcript.text)
    assert answer.transcript.logprobs == reference.transcript.logprobs
    assert (answer.state.usage, answer.state.finish_reason) == (reference.state.usage, reference.state.finish_reason)
    went_on = "presence_penalty" not in fields and "seed" not in fields
    assert (await continued_from(stack) > 0) == went_on


async def continued_from(stack: Stack) -> int:
    """The token that a second attempt went on from, as its span tells; 0: it ran again from the start."""
    pattern = re.compile(r'continued_from","value":\{"intValue":"(\d+)"')
    found: list[str] = []

    def told() -> bool:
        found[:] = [n for path in stack.directory.glob("*.jsonl") for n in pattern.findall(path.read_text())]
        return bool(found)

    await settled(told)
    assert len(found) == 1
    return int(found[0])


async def ask_while(client: Client, body: bytes, happen, **options: object) -> Answer:  # type: ignore[no-untyped-def]
    """Ask, and let something happen meanwhile; `happen` gets the answer as it grows."""
    answer = Answer(new_request_id())
    async with client.follow(answer.request, catch_up=False) as follower:
        await client.submit(body, model=MODEL, request=answer.request, **options)  # type: ignore[arg-type]
        task = asyncio.create_task(happen(answer))
        async for event in follower.events(60):
            answer.take(event)
        await task
    assert answer.transcript.complete()
    return answer


async def test_a_killed_prefill_worker_is_replaced(stack: Stack) -> None:
    stack.add("pdq_router")
    slow = stack.add("pdq_prefill", PDQ_ENGINE_SIM_FAULTS="prefill.hang=1")
    stack.add("pdq_decode")
    await stack.start()
    bus = await stack.connect()
    replacement = stack.add("pdq_prefill")

    async def kill(answer: Answer) -> None:
        while answer.story[-1:] != ["claim"]:
            await asyncio.sleep(0.01)
        slow.kill()
        replacement.start()
        replacement.wait_ready()

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=5), kill)
    await bus.close()
    assert answer.terminal == ["finished"]
    assert (answer.state.prefill.attempt, answer.state.prefill.failures) == (2, 1)
    assert answer.state.kv.loaded_tokens == 96


async def test_a_prefill_that_was_handed_off_is_not_done_again(stack: Stack) -> None:
    """As when its worker is killed before it can acknowledge: the job comes again."""
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    request = new_request_id()
    async with client.follow(request, catch_up=False) as follower:
        await client.submit(completion("k" * 100, max_tokens=5), model=MODEL, request=request, order="prefill-first")
        async for event in follower.events(20):
            if event.state is not None and event.state.event == "prefilled":
                break
    await queue_empty(stack, subjects.PREFILL)
    handoff = await bus.last(subjects.DECODE, subjects.job("decode", MODEL, "normal", "local", request))
    assert handoff is not None
    job = decode_job(handoff.data, DecodeJob)
    again = PrefillJob(
        request=request, tenant="local", model=MODEL, deadline=job.deadline, prompt=job.prompt, sampling=job.sampling
    )
    await bus.publish(subjects.job("prefill", MODEL, "normal", "local", request), encode_job(again))
    await queue_empty(stack, subjects.PREFILL)
    stack.add("pdq_decode").start()
    answer = await follow_to_end(client, request)
    await bus.close()
    assert answer.story == ["accepted", "routed", "claim", "prefilled", "claim", "finished"]
    assert answer.state.prefill.attempt == 1 and answer.state.kv.loaded_tokens == 96


async def test_a_long_job_is_executed_once_though_ack_wait_is_short(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    workers = [stack.add("pdq_decode", **SLOW) for _ in range(2)]
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("k" * 40, max_tokens=120, ignore_eos=True))
    await bus.close()
    assert answer.state.decode.attempt == 1
    assert sum(stack.metric(worker, "pdq_redeliveries_total") for worker in workers) == 0


async def test_a_killed_broker_in_mid_answer_loses_nothing(stack: Stack) -> None:
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module, **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")

    async def restart(answer: Answer) -> None:
        while len(answer.transcript.ids) < 10:
            await asyncio.sleep(0.01)
        stack.broker.kill()
        await asyncio.sleep(1)
        stack.broker.start()

    answer = await ask_while(client, completion("k" * 100, max_tokens=60, ignore_eos=True), restart)
    assert len(answer.transcript.ids) == 60 and answer.terminal == ["finished"]
    after = await ask(client, completion("k" * 100, max_tokens=5))
    await bus.close()
    assert after.terminal == ["finished"]


async def test_stopping_a_worker_gives_its_work_back_without_a_failure(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    first = stack.add("pdq_decode", PDQ_WORKER_DRAIN_S="0.2", **SLOW)
    await stack.start()
    bus = await stack.connect()
    second = stack.add("pdq_decode")

    async def drain(answer: Answer) -> None:
        while len(answer.transcript.ids) < 5:
            await asyncio.sleep(0.01)
        second.start()
        second.wait_ready()
        assert first.stop() == 0

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=400, ignore_eos=True), drain)
    await bus.close()
    assert answer.terminal == ["finished"] and len(answer.transcript.ids) == 400
    assert "released" in answer.story
    assert (answer.state.decode.attempt, answer.state.decode.failures) == (2, 0)


async def test_a_finished_job_within_the_drain_time_is_not_given_back(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_worker", **SLOW)
    await stack.start()
    bus = await stack.connect()

    async def stop(answer: Answer) -> None:
        while len(answer.transcript.ids) < 5:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(worker.stop) == 0

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=40, ignore_eos=True), stop)
    await bus.close()
    assert answer.state.decode.attempt == 1 and len(answer.transcript.ids) == 40


async def test_errors_are_retried_with_backoff_then_fail_as_a_dead_letter(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    worker = stack.add("pdq_decode", PDQ_ENGINE_SIM_FAULTS="decode.fail=1")
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("k" * 100, max_tokens=5))
    assert answer.terminal == ["failed"] and answer.state.error.code == "unavailable"
    assert answer.story.count("released") == 2 and answer.state.decode.attempt == 3
    stored = await bus.last(subjects.DEAD, subjects.dead("decode", MODEL, "local", answer.request))
    await queue_empty(stack, subjects.DECODE)
    await bus.close()
    assert stored is not None
    letter = decode_json(stored.data, DeadLetter)
    assert (letter.attempts, letter.error.code, letter.trace) == (3, "unavailable", answer.state.trace)
    assert stack.metric(worker, "pdq_dead_letters_total") == 1


@pytest.mark.parametrize("order", ["prefill-first", "decode-only"])
async def test_a_dead_letter_is_replayed_as_a_new_request(stack: Stack, order: str) -> None:
    stack.add("pdq_router")
    sick = stack.add("pdq_worker", PDQ_ENGINE_SIM_FAULTS="prefill.fail=1,decode.fail=1")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    fields = {"max_tokens": 7, "temperature": 0, "logprobs": 2, "stop": ["never"], "logit_bias": {"5": 1}}
    dead = await ask(client, completion("k" * 100, **fields), order=order, priority="high")
    assert dead.terminal == ["failed"]
    letters = await operators.dead_letters(bus)
    assert [one.letter.request for one in letters] == [dead.request]
    sick.stop()
    stack.add("pdq_worker").start()
    stack.services[-1].wait_ready()
    submitted = await operators.replay(bus, letters[0])
    async with client.follow(submitted.request) as follower:
        async for _ in follower.events(20):
            pass
    again = await read_all(client, submitted.request)
    reference = await ask(client, completion("k" * 100, **fields))
    assert again.terminal == ["finished"]
    assert (again.state.replay_of, again.state.order, again.state.priority) == (dead.request, order, "high")
    assert (again.transcript.ids, again.transcript.logprobs) == (
        reference.transcript.ids,
        reference.transcript.logprobs,
    )
    await operators.drop(bus, letters[0].seq)
    assert await operators.dead_letters(bus) == []
    await bus.close()


async def test_a_huge_body_nobody_can_read_is_a_letter_without_it(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), b"x" * 1_000_000)
    letters = await operators.dead_letters(bus)
    with pytest.raises(Rejected, match="1000000 bytes"):
        await operators.replay(bus, letters[0])
    await queue_empty(stack, subjects.SUBMIT)
    await bus.close()
    assert answer.terminal == ["failed"] and letters[0].letter.body == b""


async def test_workers_are_listed_and_one_is_drained(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_worker", **SLOW)
    await stack.start()
    bus = await stack.connect()
    beats = await operators.workers(bus)
    assert sorted(beat.stage for beat in beats) == ["decode", "prefill"]
    name = beats[0].worker

    async def drain(answer: Answer) -> None:
        while len(answer.transcript.ids) < 3:
            await asyncio.sleep(0.01)
        assert (await operators.drain(bus, name)).busy == 1

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=30, ignore_eos=True), drain)
    assert answer.terminal == ["finished"] and answer.state.decode.attempt == 1
    assert worker.process is not None and await asyncio.to_thread(worker.process.wait, 20) == 0
    assert await operators.workers(bus) == []
    with pytest.raises(Unavailable):
        await operators.drain(bus, name)
    await bus.close()


async def test_a_worker_that_dies_of_a_request_ends_it_after_bounded_attempts(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    workers = [stack.add("pdq_decode", PDQ_ENGINE_SIM_FAULTS="decode.exit_after=3") for _ in range(3)]
    await stack.start()
    spare = stack.add("pdq_decode")
    bus = await stack.connect()

    async def replace(answer: Answer) -> None:
        while any(w.process is not None and w.process.poll() is None for w in workers):
            await asyncio.sleep(0.05)
        spare.start()
        spare.wait_ready()

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=50, ignore_eos=True), replace)
    good = await ask(Client(bus, "local"), completion("k" * 100, max_tokens=5))
    await bus.close()
    assert answer.terminal == ["failed"] and answer.state.error.code == "too_many_attempts"
    assert good.terminal == ["finished"]


async def test_cancel_in_mid_answer_stops_the_engine_and_keeps_what_was_said(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    worker = stack.add("pdq_decode", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")

    async def cancel(answer: Answer) -> None:
        while len(answer.transcript.ids) < 8:
            await asyncio.sleep(0.01)
        reply = await client.cancel(answer.request)
        assert reply.state is not None and reply.state.event == "cancelled"

    answer = await ask_while(client, completion("k" * 100, max_tokens=500, ignore_eos=True), cancel)
    assert answer.terminal == ["cancelled"]
    assert answer.state.finish_reason == ""
    assert 8 <= len(answer.transcript.ids) == answer.state.usage.completion_tokens < 100
    await settled(lambda: stack.metric(worker, "pdq_worker_busy_slots") == 0)
    again = await client.cancel(answer.request)
    assert again.state is not None and again.state.event == "cancelled"
    nobody = await client.cancel("nobody")
    await bus.close()
    assert nobody.error is not None and nobody.error.code == "not_found"


async def settled(condition, seconds: float = 10) -> None:  # type: ignore[no-untyped-def]
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)


async def test_cancel_while_queued_drops_the_job_unseen(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")

    async def cancel(answer: Answer) -> None:
        while answer.story[-1:] != ["routed"]:
            await asyncio.sleep(0.01)
        await client.cancel(answer.request)

    answer = await ask_while(client, completion("k" * 100), cancel, order="prefill-first")
    await queue_empty(stack, subjects.PREFILL)
    await bus.close()
    assert answer.story == ["accepted", "routed", "cancelled"]


async def test_a_deadline_ends_a_waiting_request_with_no_worker_alive(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("k" * 100), deadline_s=1.0)
    await queue_empty(stack, subjects.DECODE)
    await queue_empty(stack, subjects.REAP)
    await bus.close()
    assert answer.story == ["accepted", "routed", "expired"]
    assert (answer.state.order, answer.state.reason) == ("decode-only", "no_prefill_worker")
    assert answer.state.error.code == "deadline_exceeded"


async def test_a_deadline_in_mid_answer_ends_it_with_what_was_said(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_worker", **SLOW)
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("k" * 100, max_tokens=1000, ignore_eos=True), deadline_s=1.5)
    await queue_empty(stack, subjects.REAP)
    await bus.close()
    assert answer.terminal == ["expired"] and answer.state.finish_reason == ""
    assert 0 < len(answer.transcript.ids) == answer.state.usage.completion_tokens < 200


async def test_requests_wait_for_a_worker_to_come(stack: Stack) -> None:
    stack.add("pdq_router")
    await stack.start()
    late = stack.add("pdq_worker")
    bus = await stack.connect()

    async def start(answer: Answer) -> None:
        await asyncio.sleep(0.5)
        late.start()

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=5), start)
    await bus.close()
    assert answer.terminal == ["finished"]


async def test_a_full_queue_refuses_at_once_and_holds_up_no_other_priority(stack: Stack) -> None:
    stack.add("pdq_router", PDQ_ROUTER_QUEUE_LIMIT="5")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    waiting = [
        asyncio.create_task(ask(client, completion("k" * 100), order="prefill-first", deadline_s=8)) for _ in range(25)
    ]
    done, _ = await asyncio.wait(waiting, timeout=5)
    refused = [task.result() for task in done]
    assert len(refused) == 20 and all(answer.terminal == ["failed"] for answer in refused)
    for answer in refused:
        assert answer.state.error.code == "queue_full" and answer.state.error.retry_after_s >= 1
        assert re.search(r"the limit is 5, the oldest waits for [0-9.]+ s", answer.state.error.message)
    other = await ask(client, completion("k" * 100), order="prefill-first", priority="high", deadline_s=1)
    assert other.terminal == ["expired"], "it was let into its own queue"
    ends = [answer.terminal for answer in await asyncio.gather(*waiting)]
    again = await ask(client, completion("k" * 100), order="prefill-first", deadline_s=1)
    await bus.close()
    assert ends.count(["expired"]) == 5
    assert again.terminal == ["expired"], "there is room again"


async def test_a_log_that_is_nearly_full_refuses_new_requests_and_drops_no_token(tmp_path: Path) -> None:
    # Large enough that what is written within a router's half second of not asking does not fill it.
    size = 6_000_000
    stack = Stack(tmp_path, limits=LimitSettings(log_max_bytes=size))
    stack.add("pdq_router")
    stack.add("pdq_worker")
    try:
        await stack.start()
        bus = await stack.connect()
        # Most of it at once, and the rest by requests.
        for _ in range(9):
            await bus.publish(subjects.out("t", new_request_id()), b"x" * 500_000)
        client = Client(bus, "local")
        answers = []
        for _ in range(1000):
            answers.append(await ask(client, completion("k" * 100, max_tokens=40, ignore_eos=True)))
            if answers[-1].terminal == ["failed"]:
                break
        info = await bus.stream_info(subjects.LOG)
        # As when old requests are forgotten.
        await bus.purge(subjects.LOG, subjects.log_of("t", "*"))
        await asyncio.sleep(FRESH_S)
        again = await ask(client, completion("k" * 100, max_tokens=5))
        await bus.close()
    finally:
        await asyncio.to_thread(stack.stop)
    assert again.terminal == ["finished"]
    error = answers[-1].state.error
    assert (error.code, "log is 8" in error.message, error.retry_after_s) == ("log_full", True, 60)
    assert all(answer.terminal == ["finished"] for answer in answers[:-1]) and len(answers) > 5
    assert info is not None and 0.8 <= info["state"]["bytes"] / size < 0.95


async def test_prefill_does_not_run_ahead_of_decode_beyond_the_room(stack: Stack) -> None:
    stack.add("pdq_router")
    # A prompt of 320 tokens is 5,120 bytes of the sim's KV: two may wait, the third is the one too many.
    stack.add("pdq_prefill", PDQ_KV_ROOM_BYTES="15000", PDQ_WORKER_SLOTS="1")
    decode = stack.add("pdq_decode")
    await stack.start()
    decode.stop()
    bus = await stack.connect()
    client = Client(bus, "local")
    bodies = [completion([i] * 320, max_tokens=2) for i in range(1, 11)]
    running = [asyncio.create_task(ask(client, body, order="prefill-first", seconds=60)) for body in bodies]
    await asyncio.sleep(3)
    decode_jobs, prefill_jobs = await bus.stream_info(subjects.DECODE), await bus.stream_info(subjects.PREFILL)
    assert decode_jobs is not None and prefill_jobs is not None
    ahead = decode_jobs["state"]["messages"]
    # The broker counts a consumer's messages a moment after it has stored them: one more may slip through.
    assert ahead in (3, 4)
    assert prefill_jobs["state"]["messages"] == 10 - ahead
    decode.start()
    answers = await asyncio.gather(*running)
    await bus.close()
    assert all(answer.terminal == ["finished"] and answer.state.kv.loaded_tokens == 319 for answer in answers)


async def test_the_handoff_twice_and_after_the_end_is_one_answer(stack: Stack) -> None:
    stack.add("pdq_router")
    worker = stack.add("pdq_worker")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, completion("k" * 100, max_tokens=5))
    job = DecodeJob(
        request=answer.request,
        tenant="local",
        model=MODEL,
        deadline=time.time() + 100,
        prompt=pack_ids([1, 2, 3]),
        sampling=Sampling(max_tokens=3),
    )
    await queue_empty(stack, subjects.DECODE)
    unknown = new_request_id()
    for request in (answer.request, unknown):
        subject = subjects.job("decode", MODEL, "normal", "local", request)
        await bus.publish(subject, encode_job(msgspec.structs.replace(job, request=request)))
    await queue_empty(stack, subjects.DECODE)
    assert (await read_all(client, answer.request)).story == answer.story
    assert (await read_all(client, unknown)).events == []
    await bus.close()
    assert worker.process is not None and worker.process.poll() is None


async def queue_empty(stack: Stack, stream: str) -> None:
    """A queue's last message is settled, or a timer purged, shortly after its request has ended."""
    bus = await stack.connect()
    give_up = time.monotonic() + 10
    while (info := await bus.stream_info(stream)) is not None and info["state"]["messages"]:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)
    await bus.close()


async def test_a_paused_worker_that_wakes_late_is_fenced_off(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    first = stack.add("pdq_decode", **SLOW)
    await stack.start()
    second = stack.add("pdq_decode")
    bus = await stack.connect()

    async def pause(answer: Answer) -> None:
        while len(answer.transcript.ids) < 8:
            await asyncio.sleep(0.01)
        assert first.process is not None
        os.kill(first.process.pid, signal.SIGSTOP)
        second.start()
        second.wait_ready()
        while answer.state.decode.attempt < 2:
            await asyncio.sleep(0.01)
        os.kill(first.process.pid, signal.SIGCONT)

    answer = await ask_while(Client(bus, "local"), completion("k" * 100, max_tokens=60, ignore_eos=True), pause)
    await asyncio.sleep(0.5)
    stored = await read_all(Client(bus, "local"), answer.request)
    await bus.close()
    assert answer.terminal == ["finished"] and len(answer.transcript.ids) == 60
    assert stored.story == answer.story and stored.transcript.complete()


async def test_the_engine_dead_means_not_ready_but_alive(stack: Stack) -> None:
    stack.add("pdq_router")
    worker: Service = stack.add("pdq_worker", PDQ_ENGINE_SIM_FAULTS="decode.crash_after=3")
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), completion("k" * 100, max_tokens=50, ignore_eos=True), seconds=60)
    await bus.close()
    assert answer.terminal == ["failed"] and answer.story.count("released") == 2
    assert worker.get("/readyz")[0] == 503
    assert worker.get("/healthz")[0] == 200


async def test_without_init_a_service_says_what_to_run(stack: Stack) -> None:
    stack.broker.start()
    for module in ("pdq_router", "pdq_worker"):
        service = stack.add(module)
        service.start()
        assert service.process is not None
        assert await asyncio.to_thread(service.process.wait, 20) == 2
        assert "pdq init" in service.log.read_text()


async def test_a_service_waits_for_the_broker_and_says_so(stack: Stack) -> None:
    await stack.start()
    await asyncio.to_thread(stack.broker.stop)
    router = stack.add("pdq_router")
    router.start()
    await settled(lambda: "waiting for the broker" in router.log.read_text())
    assert router.get("/readyz")[0] == 503
    stack.broker.start()
    router.wait_ready()


async def test_bad_settings_stop_the_process_and_name_the_variable(stack: Stack) -> None:
    for environment, said in (
        ({"PDQ_NATS_CONNECT_TIMEOUT_S": "soon"}, "PDQ_NATS_CONNECT_TIMEOUT_S"),
        ({"PDQ_NO_SUCH": "1"}, "PDQ_NO_SUCH"),
        ({"PDQ_LIMIT_LOG_AGE_S": "10"}, "PDQ_LIMIT_LOG_AGE_S"),
    ):
        service = stack.add("pdq_router", **environment)
        service.start()
        assert service.process is not None
        assert await asyncio.to_thread(service.process.wait, 20) == 2
        assert said in service.log.read_text()
