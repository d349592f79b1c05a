"""A worker of both stages: one real engine serves prefill and decode over a real broker."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from pdq.client import Client
from pdq.settings import ModelSpec

from tests.ask import Answer, ask
from tests.e2e.conftest import KvServer, real_stack
from tests.stack import Service, chat
from tests.worker import PART

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

QUESTION = "What is the capital of France? Say which river runs through it, and name one famous building there."


async def ask_all(client: Client, spec: ModelSpec) -> dict[str, Answer]:
    body = chat(QUESTION, max_tokens=24, temperature=0)
    return {
        order: await ask(client, body, model=spec.slug, order=order, seconds=120)
        for order in ("decode-first", "prefill-first", "decode-only")
    }


def core_began_early(worker: Service) -> None:
    """The core's process was there before the front had anything to tell it: they imported at the same time."""
    assert worker.process is not None
    parts = {part: float(seconds) for part, seconds in PART.findall(worker.get("/metrics")[1])}
    front = psutil.Process(worker.process.pid)
    core = max(front.children(recursive=True), key=lambda process: process.memory_info().rss)
    after = ("engine_core", "contract", "parsers", "self_test")
    told_at = front.create_time() + parts["total"] - sum(parts[name] for name in after)
    assert core.create_time() < told_at


async def test_one_engine_serves_both_stages(spec: ModelSpec, server: KvServer, tmp_path: Path) -> None:
    await server.start()
    stack = real_stack(tmp_path, spec, server)
    stack.add("pdq_router")
    worker = stack.add("pdq_worker")
    worker.ready_s = 240
    try:
        await stack.start()
        bus = await stack.connect()
        answers = await ask_all(Client(bus, "local"), spec)
        await bus.close()
        assert worker.get("/metrics")[1].count("pdq_worker_info") > 0
        core_began_early(worker)
    finally:
        stack.stop()
    delegated, first, only = answers["decode-first"], answers["prefill-first"], answers["decode-only"]
    assert delegated.story == ["accepted", "routed", "claim", "claim", "prefilled", "finished"]
    assert first.story == ["accepted", "routed", "claim", "prefilled", "claim", "finished"]
    assert "Paris" in first.transcript.text
    assert delegated.transcript.ids == first.transcript.ids == only.transcript.ids
    # The engine that prefilled it still has it: what was promised need not come back from the tier.
    for kv in (delegated.state.kv, first.state.kv):
        assert kv.promised_tokens >= spec.chunk_tokens
        assert kv.loaded_tokens + kv.local_tokens >= kv.promised_tokens
