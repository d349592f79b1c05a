"""Workers that exist only while there is work: `pdq worker`, started for a request that waits, and gone when idle."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pdq import operators, subjects, traces
from pdq.bus import Bus, Delivery, Puller
from pdq.client import Client, new_request_id
from pdq.settings import LimitSettings
from pdq.stage import Loop
from pdq.stage.run import Run

from tests.ask import Answer, ask, follow_to_end
from tests.stack import MODEL, Stack, completion
from tests.worker import Worker

BODY = completion("k" * 100, max_tokens=5)
LONG = completion("k" * 100, max_tokens=60, ignore_eos=True)
SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama2-70b-h100-tp8"}
"""About 30 ms a token."""
SPANS_S = 20.0
SCRIPT = Path(__file__).parents[2] / "infra/worker/pdq-worker.sbatch"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A broker and a router; each test starts workers of its own, and ends them."""
    stack = Stack(tmp_path_factory.mktemp("alone"), PDQ_ROUTER_ORDER="auto")
    stack.add("pdq_router")
    asyncio.run(stack.start())
    yield stack
    stack.stop()


@pytest.fixture
async def asking(alone: Stack) -> AsyncIterator[Client]:
    bus = await alone.connect()
    yield Client(bus, "local")
    await bus.close()


async def submitted(client: Client, body: bytes = BODY, **options: Any) -> str:
    request = new_request_id()
    await client.submit(body, model=MODEL, request=request, **options)
    return request


async def ended(worker: Worker, seconds: float = 20) -> tuple[int, str]:
    """Its exit code, once it has ended by itself, and the last line of its log."""
    assert worker.process is not None
    code = await asyncio.to_thread(worker.process.wait, seconds)
    return code, worker.log.read_text().splitlines()[-1]


async def spans(stack: Stack, request: str, *names: str) -> list[traces.TraceSpan]:
    """The spans of a request's trace, once those named are among them."""
    give_up = time.monotonic() + SPANS_S
    while True:
        found = [span for trace in traces.find(stack.directory, request) for span in trace.spans]
        if {span.name for span in found} >= set(names):
            return found
        assert time.monotonic() < give_up, [span.name for span in found]
        await asyncio.sleep(0.1)


async def test_a_request_waits_with_no_worker_alive_and_its_trace_shows_why(alone: Stack, asking: Client) -> None:
    request = await submitted(asking)
    await asyncio.sleep(0.3)
    worker = Worker(alone, "decode", "--idle-exit", "1")
    worker.start()
    answer = await follow_to_end(asking, request)
    assert answer.terminal == ["finished"]
    assert (answer.state.order, answer.state.reason) == ("decode-only", "no_prefill_worker")
    later = await ask(asking, BODY)
    code, last = await ended(worker)
    assert code == 0 and "msg=stopped reason=idle" in last
    bus = await alone.connect()
    assert await operators.workers(bus) == []
    await bus.close()

    found = {span.name: span for span in await spans(alone, request, "cold start", "process decode", "queue")}
    cold, process = found["cold start"], found["process decode"]
    queue = next(span for span in process.children if span.name == "queue")
    assert cold in process.children
    assert queue.start_ns <= cold.start_ns < cold.end_ns <= queue.end_ns
    parts = {name: value for name, value in cold.attributes.items() if name.startswith("pdq.start.")}
    assert parts.keys() == {f"pdq.start.{part}_ms" for part in ("import", "broker", "engine", "total")}
    assert all(isinstance(value, float) and value >= 0 for value in parts.values())
    # It was submitted before the process was made: the whole start is shown.
    assert parts["pdq.start.total_ms"] == pytest.approx((cold.end_ns - cold.start_ns) / 1e6, abs=1)
    assert "cold start" not in {span.name for span in await spans(alone, later.request, "process decode")}


async def test_both_stages_come_from_zero_for_a_request_that_asks_for_them(alone: Stack, asking: Client) -> None:
    request = await submitted(asking, order="prefill-first")
    prefill = Worker(alone, "prefill", "--idle-exit", "1")
    prefill.start()
    assert (await ended(prefill))[0] == 0
    decode = Worker(alone, "decode", "--idle-exit", "1")
    decode.start()
    answer = await follow_to_end(asking, request)
    assert answer.story == ["accepted", "routed", "claim", "prefilled", "claim", "finished"]
    assert (await ended(decode))[0] == 0
    found = await spans(alone, request, "process decode", "cold start")
    assert {span.service for span in found if span.name == "cold start"} == {"prefill", "decode"}


async def test_a_busy_worker_is_not_idle(alone: Stack, asking: Client) -> None:
    request = await submitted(asking, LONG)
    worker = Worker(alone, "both", "--idle-exit", "0.5", **SLOW)
    worker.start()
    answer = await follow_to_end(asking, request)
    assert answer.terminal == ["finished"] and answer.state.decode.attempt == 1
    assert (await ended(worker))[0] == 0
    assert "released" not in answer.story


async def ended_in_mid_answer(client: Client, end: Callable[[], None]) -> Answer:
    """A long answer, in whose midst `end` is called."""
    answer, told = Answer(new_request_id()), False
    async with client.follow(answer.request, catch_up=False) as follower:
        await client.submit(LONG, model=MODEL, request=answer.request)
        async for event in follower.events(30):
            answer.take(event)
            if not told and len(answer.transcript.ids) >= 5:
                told = True
                end()
    assert told
    return answer


async def test_a_signal_lets_finish_what_runs_and_the_log_says_why(alone: Stack, asking: Client) -> None:
    worker = Worker(alone, "both", **SLOW)
    worker.start()
    assert worker.process is not None
    answer = await ended_in_mid_answer(asking, worker.process.terminate)
    code, last = await ended(worker)
    assert (answer.terminal, answer.state.decode.attempt) == (["finished"], 1)
    assert code == 0 and "msg=stopped reason=SIGTERM" in last


async def test_it_listens_nowhere_when_the_health_server_is_off(alone: Stack) -> None:
    worker = Worker(alone, "both")
    worker.file.write_text(worker.file.read_text() + "PDQ_HTTP_PORT=off\n")
    worker.start()
    assert worker.process is not None
    give_up = time.monotonic() + 30
    while "msg=ready" not in worker.log.read_text():
        assert time.monotonic() < give_up and worker.process.poll() is None, worker.log.read_text()
        await asyncio.sleep(0.05)
    connections = psutil.Process(worker.process.pid).net_connections()
    assert [found.status for found in connections] == [psutil.CONN_ESTABLISHED]
    assert worker.stop() == 0


def batch_script(stack: Stack, file: Path) -> subprocess.Popen[bytes]:
    """The Slurm script as plain bash: both stages, without the LMCache server, of which the sim has no use."""
    given = {"PDQ": str(Path(sys.executable).parent), "ENV_FILE": str(file), "KV_SERVER": "0", "IDLE_EXIT": "2"}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with open(stack.directory / "sbatch.log", "wb") as out:
        return subprocess.Popen(["bash", str(SCRIPT)], env=kept | given, stdout=out, stderr=out)


async def test_the_batch_script_serves_and_ends_when_idle(alone: Stack, asking: Client) -> None:
    request = await submitted(asking, order="prefill-first")
    job = batch_script(alone, Worker(alone, "both").file)
    answer = await follow_to_end(asking, request)
    assert answer.terminal == ["finished"] and "prefilled" in answer.story
    assert await asyncio.to_thread(job.wait, 20) == 0
    assert "reason=idle" in (alone.directory / "sbatch.log").read_text().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
async def test_the_batch_script_drains_before_its_time_is_over(
    number: signal.Signals, alone: Stack, asking: Client
) -> None:
    job = batch_script(alone, Worker(alone, "both", **SLOW).file)
    answer = await ended_in_mid_answer(asking, lambda: job.send_signal(number))
    assert (answer.terminal, answer.state.decode.attempt) == (["finished"], 1)
    assert await asyncio.to_thread(job.wait, 20) == 0
    assert "reason=SIGTERM" in (alone.directory / "sbatch.log").read_text().splitlines()[-1]


async def test_a_worker_that_waits_for_room_is_not_idle(bus: Bus) -> None:
    async def process(delivery: Delivery, run: Run) -> None:
        raise AssertionError("nothing was queued")

    async def admit() -> None:
        await room.wait()

    stop, room = asyncio.Event(), asyncio.Event()
    puller = Puller(bus, subjects.PREFILL, [subjects.consumer(MODEL, "normal")])
    loop = Loop(puller, process, slots=1, ack_wait_s=30, stall_s=60, drain_s=5, admit=admit)
    running = asyncio.create_task(loop.run(stop))
    await asyncio.sleep(0.1)
    assert loop.held_up
    room.set()
    await asyncio.sleep(0.1)
    assert not loop.held_up
    stop.set()
    await asyncio.wait_for(running, 10)


@pytest.mark.parametrize("limits", [LimitSettings(ack_wait_s=1.0)])
async def test_the_message_of_stalled_work_goes_to_another_though_the_work_goes_on(bus: Bus) -> None:
    consumers = [subjects.consumer(MODEL, "normal")]
    begun, over, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stalls(delivery: Delivery, run: Run) -> None:
        begun.set()
        await over.wait()

    loop = Loop(Puller(bus, subjects.PREFILL, consumers), stalls, slots=1, ack_wait_s=1.0, stall_s=0.5, drain_s=5)
    running = asyncio.create_task(loop.run(stop))
    await bus.publish(subjects.job("prefill", MODEL, "normal", "local", "r1"), b"")
    await asyncio.wait_for(begun.wait(), 10)
    another = Puller(bus, subjects.PREFILL, consumers)
    delivery = await asyncio.wait_for(another.get(), 20)
    assert delivery.num_delivered == 2
    assert loop.busy == 1
    await delivery.ack()
    over.set()
    stop.set()
    await asyncio.wait_for(running, 10)
    await another.close()


class Stopping(Puller):
    """Tells its loop to stop in the very moment in which a message has come."""

    stop: asyncio.Event

    async def get(self) -> Delivery:
        delivery = await super().get()
        self.stop.set()
        return delivery


async def test_a_job_that_comes_as_the_worker_ends_is_given_back_at_once(bus: Bus) -> None:
    """Its ack wait is 30 s: it is there for the next one long before, and nothing of it was begun."""
    begun: list[int] = []

    async def process(delivery: Delivery, run: Run) -> None:
        begun.append(delivery.seq)

    consumers = [subjects.consumer(MODEL, "normal")]
    puller = Stopping(bus, subjects.DECODE, consumers)
    puller.stop = asyncio.Event()
    loop = Loop(puller, process, slots=4, ack_wait_s=30, stall_s=60, drain_s=5)
    running = asyncio.create_task(loop.run(puller.stop))
    await bus.publish(subjects.job("decode", MODEL, "normal", "local", "r-1"), b"job", timeout_s=5)
    await asyncio.wait_for(running, 10)
    assert begun == []
    again = Puller(bus, subjects.DECODE, consumers)
    delivery = await asyncio.wait_for(again.get(), 10)
    assert (delivery.data, delivery.num_delivered) == (b"job", 2)
    await delivery.ack()
    await again.close()


async def test_a_worker_that_is_told_to_end_while_its_engine_starts_has_not_failed(alone: Stack) -> None:
    worker = Worker(alone, "both", PDQ_ENGINE_SIM_PROFILE="opt-13b-a100-tp1*10000")
    worker.start()
    while "health server" not in worker.log.read_text():
        await asyncio.sleep(0.05)
    assert worker.stop() == 0
    assert "msg=ready" not in worker.log.read_text()
    assert "reason=SIGTERM" in worker.log.read_text().splitlines()[-1]
