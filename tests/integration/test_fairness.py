"""Several tenants at one time: a flood of one, and limits, whichever way requests come in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.messages import State, decode_json
from pdq.settings import LimitSettings
from pdq.tenants import Store

from tests.ask import Answer, ask, refused
from tests.integration.test_limits import until_queued
from tests.stack import MODEL, Stack, completion

FLOOD, TRICKLE, SHARE = 500, 20, 16


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=2.0))
    yield stack
    stack.stop()


async def flood(bus: Bus, tenant: str, number: int, priority: str = "normal") -> None:
    """Submit requests, and wait until they are queued."""
    client = Client(bus, tenant)
    body = completion("f" * 20, max_tokens=2)
    await asyncio.gather(*(client.submit(body, model=MODEL, priority=priority) for _ in range(number)))
    await until_queued(bus, subjects.DECODE, number)


async def trickle(bus: Bus, tenant: str, number: int, **options: object) -> list[Answer]:
    """One request after the other."""
    client = Client(bus, tenant)
    return [await ask(client, completion("t" * 20, max_tokens=2), **options) for _ in range(number)]


async def claims_before(bus: Bus, answers: list[Answer]) -> list[int]:
    """For each request, how many of others were claimed between its routing and its own claim."""
    stored = await bus.read(subjects.LOG, "pdq.log.*.*.state", limit=10_000)
    claims = [one.seq for one in stored if decode_json(one.data, State).event == "claim"]
    waits = []
    for answer in answers:
        at = {event.state.event: event.seq for event in answer.events if event.state is not None}
        waits.append(sum(at["routed"] < seq < at["claim"] for seq in claims))
    return waits


async def run(stack: Stack, share: int, *, others_flood: bool, registered: bool = True) -> list[int]:
    """A floods, then B sends one request after the other: how many of A's go before each of B's."""
    stack.add("pdq_router", PDQ_ROUTER_FAIR_SHARE=str(share))
    await stack.start()
    bus = await stack.connect()
    if registered:
        store = Store(bus)
        await store.add("a")
        await store.add("b")
        await asyncio.sleep(1.5)
    if others_flood:
        await flood(bus, "a", FLOOD)
    # Some 45 ms a request: much longer than a job takes from its routing to its queue.
    stack.add("pdq_worker", PDQ_WORKER_SLOTS="1", PDQ_ENGINE_SIM_PROFILE="llama2-70b-h100-tp8*0.5").start()
    waits = await claims_before(bus, await trickle(bus, "b", TRICKLE, order="decode-only", seconds=60))
    await bus.close()
    return waits


def p95(values: list[int]) -> int:
    return sorted(values)[int(len(values) * 0.95) - 1]


async def test_a_flood_of_one_tenant_does_not_starve_another(stack: Stack) -> None:
    waits = await run(stack, SHARE, others_flood=True)
    # The first waits for what is left of the other's share; what follows for the turns of the lane behind.
    assert waits[0] <= SHARE + 2 and p95(waits) <= 2 and max(waits[1:]) <= SHARE


async def test_alone_it_waits_for_nobody(stack: Stack) -> None:
    assert await run(stack, SHARE, others_flood=False) == [0] * TRICKLE


async def test_without_fairness_it_would_wait_for_the_whole_flood(stack: Stack) -> None:
    waits = await run(stack, 0, others_flood=True)
    assert max(waits) > FLOOD / 2
