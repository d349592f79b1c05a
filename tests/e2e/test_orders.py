"""Who goes first, with two real engines: each order gives the same answer, and decode-first moves KV as promised."""

from __future__ import annotations

from pathlib import Path

import pytest
from pdq.client import Client
from pdq.settings import ModelSpec

from tests.ask import ask
from tests.e2e.conftest import KvServer, real_stack
from tests.stack import chat

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

QUESTION = "Name the capital of Italy, and say in two sentences why so many people travel to this city every year."
ANOTHER = "What is the largest planet of the solar system? Tell in one sentence how it differs from the earth."


async def test_each_order_gives_the_same_answer(spec: ModelSpec, server: KvServer, tmp_path: Path) -> None:
    await server.start()
    stack = real_stack(tmp_path, spec, server)
    stack.add("pdq_router")
    workers = [stack.add(f"pdq_{stage}", PDQ_ENGINE_CPUS=str(cpu)) for cpu, stage in enumerate(("prefill", "decode"))]
    for worker in workers:
        worker.ready_s = 300
    body, other = (chat(text, max_tokens=16, temperature=0) for text in (QUESTION, ANOTHER))
    try:
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        plain = await ask(Client(bus, "another"), body, model=spec.slug, order="decode-only", seconds=120)
        first = await ask(client, body, model=spec.slug, order="decode-first", seconds=120)
        again = await ask(client, body, model=spec.slug, order="decode-first", seconds=120)
        handed = await ask(client, other, model=spec.slug, order="prefill-first", seconds=120)
        held = await ask(client, other, model=spec.slug, order="decode-first", seconds=120)
        await bus.close()
    finally:
        stack.stop()
    assert first.story == ["accepted", "routed", "claim", "claim", "prefilled", "finished"]
    kv = first.state.kv
    assert kv.loaded_tokens == kv.promised_tokens >= spec.chunk_tokens
    assert plain.state.kv.loaded_tokens == 0, "another tenant's KV is not there: nothing else could have made it"
    assert first.transcript.ids == plain.transcript.ids == again.transcript.ids
    # What the tiers hold by now is not delegated again.
    alone = ["accepted", "routed", "claim", "finished"]
    assert again.story == held.story == alone
    assert handed.transcript.ids == held.transcript.ids
    assert held.state.kv.loaded_tokens + held.state.kv.local_tokens == handed.state.kv.promised_tokens
