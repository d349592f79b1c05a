"""Streams of real engines through gateways: clients leave, gateways and decode die, and every answer is whole."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq.client import Client
from pdq.settings import LimitSettings, ModelSpec

from tests.e2e.conftest import ENGINE_START_S, KvServer, real_stack
from tests.resume.asking import Asked
from tests.resume.deaths import Deaths
from tests.resume.plan import Ask, Return
from tests.resume.report import Report
from tests.resume.run import carry_out, in_calm, judge
from tests.resume.scene import Scene
from tests.stack import Stack

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

SEED = 4
BOUND_S = ENGINE_START_S + 60.0
"""For one request: a start of the engine is part of it."""
STORY = "The old lighthouse keeper wrote one line in his book every night, and every line was about the weather. "
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    (f"Write a letter to this man. {STORY * 3}", {}),
    (f"Tell what happened to him then. {STORY * 2}", {"repetition_penalty": 1.3}),
    (f"Write a poem about him. {STORY * 2}", {"presence_penalty": 0.5}),
    (f"Say what his days were like. {STORY}", {"stream_options": {"include_usage": True}}),
    (f"Continue this story. {STORY * 3}", {"stop": ["the captain's daughter", "\n\n\n"]}),
)


@pytest.fixture
def stack(spec: ModelSpec, server: KvServer, tmp_path: Path) -> Iterator[Stack]:
    stack = real_stack(tmp_path, spec, server, limits=LimitSettings(ack_wait_s=3.0, worker_ttl_s=5.0))
    yield stack
    stack.stop()


def asks(model: str) -> list[Ask]:
    rng = random.Random(SEED)
    fields = {"model": model, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    return [
        Ask(
            key=f"story {number}",
            path="/chat/completions",
            body={**fields, **more, "messages": [{"role": "user", "content": question}]},
            gateway=number % 2,
            cuts=(rng.uniform(0.05, 0.3), rng.uniform(0.4, 0.9)),
            returns=tuple(Return(rng.choice(("post", "get")), rng.randrange(2)) for _ in range(8)),
            gateway_dies=rng.uniform(0.1, 0.8),
            decode_dies=rng.uniform(0.2, 0.6),
        )
        for number, (question, more) in enumerate(QUESTIONS)
    ]


async def test_streams_are_whole_whatever_dies(stack: Stack, server: KvServer, spec: ModelSpec) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    stack.add("pdq_router")
    stack.add("pdq_prefill", PDQ_ENGINE_CPUS=str(cpus[0])).ready_s = ENGINE_START_S
    stack.add("pdq_decode", PDQ_ENGINE_CPUS=str(cpus[-1]), PDQ_WORKER_ID="decode").ready_s = ENGINE_START_S
    for _ in range(2):
        stack.add("pdq_gateway")
    await server.start()
    await stack.start()
    scene, asked_for = Scene(stack), asks(spec.slug)
    calm = await in_calm(asked_for, scene, BOUND_S)
    asked = [Asked(ask, calm[ask.key].size) for ask in asked_for]
    report, bus = Report(seed=SEED), await stack.connect()
    client = Client(bus, "local")
    try:
        await carry_out(asked, Deaths(asked, scene, client), scene, BOUND_S)
        for one in asked:
            await judge(one, calm, scene, client, report)
    finally:
        await bus.close()
    report.killed = dict(scene.done)
    print("\n".join(report.lines()))
    assert report.ok and not scene.troubles(), report.lines()
    for met in ("cut by the client", "cut by its gateway's death", "decode killed in mid-answer"):
        assert report.met[met] >= 4, report.lines()
