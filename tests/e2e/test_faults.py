"""Real engines die with work in their hands: every answer is whole, and equal to that of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pdq.bus import Bus
from pdq.client import Client
from pdq.log import Transcript
from pdq.messages import Event
from pdq.settings import LimitSettings, ModelSpec

from tests.chaos.asking import Asked, Asker
from tests.chaos.check import violations
from tests.chaos.plan import Ask
from tests.chaos.reference import Reference
from tests.chaos.report import Report, log_lines
from tests.chaos.run import read
from tests.e2e.conftest import ENGINE_START_S, KvServer, real_stack
from tests.stack import Service, Stack

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

ACK_WAIT_S = 3.0
BOUND_S = ENGINE_START_S + 60.0
"""For one request: a start of the engine is part of it."""
MAX_TOKENS = 64
STORY = "The old lighthouse keeper wrote one line in his book every night, and every line was about the weather. "
DECODING: dict[str, dict[str, Any]] = {
    f"Write a letter to this man. {STORY * 3}": {},
    f"Tell what happened to him then. {STORY * 2}": {"presence_penalty": 0.5},
    f"Write a poem about him. {STORY * 4}": {"stop": ["the captain's daughter", "\n\n\n"]},
    f"Say what his days were like. {STORY}": {"min_tokens": 60},
}
"""In mid-answer when decode dies, with fields of their own: three must be run again from the start."""
PREFILLING: dict[str, dict[str, Any]] = {
    f"Summarise this. {STORY * 9}": {},
    f"Translate this into Spanish. {STORY * 8}": {},
    f"Continue this story. {STORY * 10}": {"frequency_penalty": 0.3},
    f"Count the words of this. {STORY * 7}": {},
}
"""In prefill when that dies."""
QUESTIONS = DECODING | PREFILLING


class Run:
    """All questions of one tenant: what is stored of one finds nothing of another."""

    def __init__(self, bus: Bus, tenant: str, model: str) -> None:
        self.asked = [Asked(ask(tenant, question, fields)) for question, fields in QUESTIONS.items()]
        self._bus = bus
        self._asker = Asker(Client(bus, tenant), BOUND_S, model)
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, asked: Sequence[Asked]) -> None:
        self._tasks += [asyncio.create_task(self._asker.run(one, 0.0)) for one in asked]

    async def logs(self) -> list[list[Event]]:
        """What is stored of each, once all have ended."""
        await asyncio.gather(*self._tasks)
        return [await read(self._bus, one.ask) for one in self.asked]


def ask(tenant: str, question: str, fields: dict[str, Any]) -> Ask:
    return Ask(
        request=f"{tenant}-{list(QUESTIONS).index(question)}",
        tenant=tenant,
        at_s=0.0,
        shape="chat",
        prompt=tuple(question.encode("ascii")),
        fields={"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **fields},
        priority="normal",
        order="prefill-first",
        deadline_s=None,
        cancel_s=None,
        again_s=None,
        leave_s=None,
    )


def reference(events: Sequence[Event]) -> Reference:
    """The answer of a request that nothing happened to."""
    transcript = Transcript()
    for event in events:
        transcript.feed(event)
    end = transcript.state
    assert end is not None and end.event == "finished" and end.usage is not None, log_lines(events)
    assert (end.prefill.attempt, end.decode.attempt, transcript.complete()) == (1, 1, True)
    return Reference(tuple(transcript.ids), transcript.text, end.finish_reason, end.usage, tuple(transcript.logprobs))


@pytest.fixture
def stack(spec: ModelSpec, server: KvServer, tmp_path: Path) -> Iterator[Stack]:
    stack = real_stack(tmp_path, spec, server, limits=LimitSettings(ack_wait_s=ACK_WAIT_S, worker_ttl_s=5.0))
    yield stack
    stack.stop()


async def test_prefill_and_decode_are_killed_at_work(stack: Stack, server: KvServer, spec: ModelSpec) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    stack.add("pdq_router")
    prefill = stack.add("pdq_prefill", PDQ_ENGINE_CPUS=str(cpus[0]))
    decode = stack.add("pdq_decode", PDQ_ENGINE_CPUS=str(cpus[-1]))
    prefill.ready_s = decode.ready_s = ENGINE_START_S
    await server.start()
    await stack.start()
    bus = await stack.connect()
    try:
        calm, hit = Run(bus, "calm", spec.slug), Run(bus, "hit", spec.slug)
        calm.begin(calm.asked)
        references = [reference(events) for events in await calm.logs()]
        await kill_both(hit, prefill, decode)
        logs = await hit.logs()
    finally:
        await bus.close()
    report = Report(seed=0, requests=len(logs))
    report.count_logs(logs)
    for one, expected, events in zip(hit.asked, references, logs, strict=True):
        assert not violations(one, expected, events), log_lines(events)
    assert report.attempts["prefill again"] >= 2
    assert report.attempts["from several"] >= 3


async def kill_both(run: Run, prefill: Service, decode: Service) -> None:
    """Half of the questions are in mid-answer, and the others in prefill."""
    decoding, prefilling = run.asked[: len(DECODING)], run.asked[len(DECODING) :]
    run.begin(decoding)
    await until(lambda: all(one.num_tokens >= 5 for one in decoding))
    run.begin(prefilling)
    await until(lambda: all("claim" in story(one) for one in prefilling))
    for service in (prefill, decode):
        service.kill()
    assert not any(one.ended for one in decoding)
    assert sum("prefilled" in story(one) for one in prefilling) <= 2
    for service in (prefill, decode):
        service.start()


def story(asked: Asked) -> list[str]:
    return [event.state.event for event in asked.seen if event.state is not None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():
            await asyncio.sleep(0.01)
