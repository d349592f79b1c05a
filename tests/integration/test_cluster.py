"""Three brokers: one dies under load, the leader of the log among them, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.errors import Unavailable
from pdq.settings import LimitSettings

from tests.ask import Answer, ask
from tests.broker import Broker, Cluster
from tests.stack import Stack, completion

NUM_REQUESTS = 40


async def leader(bus: Bus, cluster: Cluster, stream: str) -> Broker:
    info = await bus.stream_info(stream)
    assert info is not None
    name = info["cluster"]["leader"]
    return cluster.brokers[int(name.removeprefix("n"))]


async def asked(client: Client, body: bytes) -> Answer:
    """As a client asks whose own broker may be the one that dies: again, where it cannot even begin."""
    request = new_request_id()
    for _ in range(5):
        with contextlib.suppress(Unavailable):
            return await ask(client, body, request=request, seconds=90)
    return await ask(client, body, request=request, seconds=90)


async def until_behind(stack: Stack) -> None:
    """Until the router's gauges tell of a replica that is away."""
    async with asyncio.timeout(60):
        while not stack.metric(stack.services[0], "pdq_stream_replicas_behind"):
            await asyncio.sleep(0.2)


async def test_the_leader_dies_under_load(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    stack = Stack(
        tmp_path,
        cluster=cluster,
        limits=LimitSettings(replicas=3, ack_wait_s=3.0),
        PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100",
    )
    for module in ("pdq_router", "pdq_prefill", "pdq_decode", "pdq_decode"):
        stack.add(module)
    try:
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        reference = await ask(client, completion("k" * 100, max_tokens=30, ignore_eos=True, temperature=0))

        async def later(number: int) -> list[int]:
            await asyncio.sleep(number * 0.15)
            body = completion("k" * 100, max_tokens=30, ignore_eos=True, temperature=0)
            answer = await asked(client, body)
            assert answer.terminal == ["finished"]
            return answer.transcript.ids

        running = [asyncio.create_task(later(number)) for number in range(NUM_REQUESTS)]
        await asyncio.sleep(1.5)
        dying = await leader(bus, cluster, subjects.LOG)
        dying.kill()
        await until_behind(stack)
        dying.start()
        answers = await asyncio.gather(*running)
        await bus.close()
        assert answers == [reference.transcript.ids] * NUM_REQUESTS
    finally:
        stack.stop()
