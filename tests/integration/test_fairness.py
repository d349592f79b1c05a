"""Several tenants at one time: a flood of one, and limits, whichever way requests come in."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.log import RequestLog, first, follow
from pdq.messages import StageName, State, decode_json
from pdq.settings import LimitSettings
from pdq.tenants import Store
from pdq.tenants.usage import FRESH_S

from tests.ask import Answer, ask, refused, submit_command
from tests.stack import MODEL, Service, Stack, completion

FLOOD, TRICKLE, SHARE = 500, 20, 16


PATIENCE_S = 120.0
"""For what takes seconds, on a machine that is busy with other things."""


class Patient(Stack):
    """One whose services may take long to start."""

    def add(self, module: str, **more: str) -> Service:
        service = super().add(module, **more)
        service.ready_s = PATIENCE_S
        return service


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Patient(tmp_path, limits=LimitSettings(ack_wait_s=2.0))
    yield stack
    stack.stop()


async def until_queued(bus: Bus, stream: str, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (info := await bus.stream_info(stream)) is None or info["state"]["messages"] < number:
            await asyncio.sleep(0.05)


async def flood(bus: Bus, tenant: str, number: int, priority: str = "normal") -> None:
    """Submit requests, and wait until they are queued."""
    client = Client(bus, tenant)
    body = completion("f" * 20, max_tokens=2)
    await asyncio.gather(*(client.submit(body, model=MODEL, priority=priority) for _ in range(number)))
    await until_queued(bus, subjects.DECODE, number)


async def trickle(bus: Bus, tenant: str, number: int, **options: Any) -> list[Answer]:
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
    waits = await claims_before(bus, await trickle(bus, "b", TRICKLE, order="decode-only", seconds=PATIENCE_S))
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


# ---- limits


BODY = completion("k" * 10, max_tokens=20)
"""At most 30 tokens."""


async def limited(stack: Stack, *, routers: int = 1, **limits: int) -> tuple[Bus, Client]:
    """A stack without workers, and a tenant with limits."""
    for _ in range(routers):
        stack.add("pdq_router")
    await stack.start()
    bus = await stack.connect()
    await Store(bus).add("a", limits=limits)
    await asyncio.sleep(1.5)
    return bus, Client(bus, "a")


async def routed(client: Client, number: int) -> list[str]:
    """Submit requests one after the other, until a router has dealt with each: the events they have then."""
    events: list[str] = []
    for _ in range(number):
        request = new_request_id()
        async with client.follow(request, catch_up=False) as follower:
            await client.submit(BODY, model=MODEL, request=request)
            async for event in follower.events(PATIENCE_S):
                if event.state is not None and event.state.event != "accepted":
                    events.append(event.state.event)
                    break
    return events


async def test_a_tenant_at_its_limit_is_told_so_and_let_in_again(stack: Stack) -> None:
    bus, client = await limited(stack, requests_in_flight=3)
    other = Client(bus, "b")
    assert await routed(client, 3) == ["routed"] * 3
    answer = await refused(client, BODY, seconds=PATIENCE_S)
    error = answer.state.error
    assert error.code == "rate_limit_exceeded" and error.retry_after_s == 1.0
    assert "limit of 3 requests in flight" in error.message
    assert await routed(other, 5) == ["routed"] * 5
    code, said = await asyncio.to_thread(submit_command, stack, PDQ_TENANT="a")
    assert code == 4 and said.startswith("pdq: rate_limit_exceeded: ")
    stack.add("pdq_worker").start()
    async with asyncio.timeout(PATIENCE_S):
        while (await ask(client, BODY, seconds=PATIENCE_S)).terminal == ["failed"]:
            await asyncio.sleep(0.1)
    await bus.close()


@pytest.mark.parametrize(
    ("limits", "number"),
    [({"requests_queued": 4}, 4), ({"tokens_in_flight": 100}, 3), ({"tokens_per_minute": 100}, 3)],
)
async def test_each_limit_is_kept(stack: Stack, limits: dict[str, int], number: int) -> None:
    bus, client = await limited(stack, **limits)
    assert await routed(client, number + 2) == ["routed"] * number + ["failed"] * 2
    answer = await refused(client, completion("k" * 10, max_tokens=1_000))
    assert answer.state.error.code == ("rate_limit_exceeded" if "requests_queued" in limits else "invalid_value")
    await bus.close()


async def test_a_limit_per_minute_counts_what_has_ended(stack: Stack) -> None:
    stack.add("pdq_worker")
    bus, client = await limited(stack, requests_per_minute=4)
    assert [(await ask(client, BODY, seconds=PATIENCE_S)).terminal for _ in range(4)] == [["finished"]] * 4
    answer = await refused(client, BODY, seconds=PATIENCE_S)
    assert answer.state.error.code == "rate_limit_exceeded" and 20 < answer.state.error.retry_after_s <= 61
    await Store(bus).limit("a", {"requests_per_minute": 5})
    async with asyncio.timeout(PATIENCE_S):  # a limit that is changed counts soon
        while (await ask(client, BODY, seconds=PATIENCE_S)).terminal == ["failed"]:
            await asyncio.sleep(0.2)
    await bus.close()


async def test_several_routers_count_together(stack: Stack) -> None:
    bus, client = await limited(stack, routers=3, requests_in_flight=6)
    assert await routed(client, 12) == ["routed"] * 6 + ["failed"] * 6
    await bus.close()


async def test_a_flood_over_a_limit_passes_it_by_little_with_several_routers(stack: Stack) -> None:
    bus, client = await limited(stack, routers=2, requests_in_flight=20)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(client.submit(BODY, model=MODEL) for _ in range(200)))
        while (info := await bus.stream_info(subjects.SUBMIT)) is None or info["state"]["messages"]:
            await asyncio.sleep(0.1)
    info = await bus.stream_info(subjects.DECODE)
    await bus.close()
    # Each has 32 slots: what both route in the same moment is the most that may pass.
    assert info is not None and 20 <= info["state"]["messages"] <= 20 + 32


async def test_a_router_that_starts_knows_what_is_in_flight(stack: Stack) -> None:
    bus, client = await limited(stack, requests_in_flight=3, tokens_in_flight=1_000)
    assert await routed(client, 3) == ["routed"] * 3
    await until_queued(bus, subjects.DECODE, 3)
    router = stack.services[0]
    router.kill()
    router.start()
    await asyncio.to_thread(router.wait_ready)
    assert await routed(client, 2) == ["failed"] * 2
    await bus.close()


async def test_ends_that_a_router_missed_make_room_once_the_broker_is_back(stack: Stack) -> None:
    bus, client = await limited(stack, requests_in_flight=3)
    assert await routed(client, 3) == ["routed"] * 3
    await asyncio.sleep(FRESH_S + 1)
    # Nobody is told of a purge.
    await bus.purge(subjects.DECODE, "pdq.decode.*.*.a.*")
    await bus.purge(subjects.PREFILL, "pdq.prefill.*.*.a.*")
    assert await routed(client, 1) == ["failed"]
    await bus.close()
    stack.broker.kill()
    stack.broker.start()
    bus = await stack.connect()
    async with asyncio.timeout(PATIENCE_S):
        while await routed(Client(bus, "a"), 1) != ["routed"]:
            await asyncio.sleep(0.2)
    await bus.close()


# ---- the lane behind all


async def several(stack: Stack, **settings: str) -> tuple[Bus, Client]:
    """A router with a share of one, two tenants, and no worker."""
    stack.add("pdq_router", PDQ_ROUTER_FAIR_SHARE="1", **settings)
    await stack.start()
    bus = await stack.connect()
    for tenant in ("a", "b"):
        await Store(bus).add(tenant)
    await asyncio.sleep(1.5)
    return bus, Client(bus, "a")


async def lanes(bus: Bus, stage: StageName) -> dict[str, str]:
    """The lane of every queued job of a stage, by its request."""
    info = await bus.stream_info(subjects.STAGE_STREAM[stage], f"pdq.{stage}.>")
    jobs = map(subjects.parse_job, (info["state"].get("subjects") or {}) if info else ())
    return {job.request: job.priority for job in jobs}


@pytest.mark.parametrize("order", ["prefill-first", "decode-first", "decode-only"])
async def test_what_is_over_a_share_is_served_as_all_else(stack: Stack, order: str) -> None:
    bus, client = await several(stack)
    prefill = stack.add("pdq_prefill")
    prefill.start()
    await asyncio.to_thread(prefill.wait_ready)
    await asyncio.to_thread(prefill.stop)
    body = completion("k" * 300, max_tokens=5, temperature=0)
    waiting = [
        asyncio.create_task(ask(client, body, order=order, request=f"r{number}", seconds=PATIENCE_S))
        for number in range(3)
    ]
    async with asyncio.timeout(PATIENCE_S):
        while len(await lanes(bus, "prefill") | await lanes(bus, "decode")) < 3:
            await asyncio.sleep(0.05)
    found = await lanes(bus, "prefill") | await lanes(bus, "decode")
    assert sorted(found.values()) == ["excess", "excess", "normal"]
    prefill.start()
    stack.add("pdq_decode").start()
    answers = await asyncio.gather(*waiting)
    assert [answer.terminal for answer in answers] == [["finished"]] * 3
    assert len({answer.transcript.digest() for answer in answers}) == 1
    assert {answer.request: answer.state.lane or answer.state.priority for answer in answers} == found
    async with asyncio.timeout(PATIENCE_S):  # a job is settled a moment after its request's end
        while await lanes(bus, "prefill") | await lanes(bus, "decode"):
            await asyncio.sleep(0.05)
    await bus.close()


async def test_a_request_over_its_share_is_cancelled_as_any_other(stack: Stack) -> None:
    bus, client = await several(stack)
    waiting = [asyncio.create_task(ask(client, BODY, request=f"r{number}", seconds=PATIENCE_S)) for number in range(2)]
    await until_queued(bus, subjects.DECODE, 2)
    (over,) = (request for request, lane in (await lanes(bus, "decode")).items() if lane == "excess")
    reply = await client.cancel(over)
    assert reply.state is not None and reply.state.event == "cancelled"
    assert over not in await lanes(bus, "decode") and len(await lanes(bus, "decode")) == 1
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await bus.close()


async def test_a_submit_that_is_delivered_again_has_one_job_in_its_first_lane(stack: Stack) -> None:
    """A router dies after `routed`, and the next one, which may think otherwise of the share, goes by the log."""
    bus, client = await several(stack)
    assert await routed(client, 1) == ["routed"]
    log = RequestLog(bus)
    info = await bus.stream_info(subjects.SUBMIT)
    assert info is not None
    seq = info["state"]["last_seq"] + 1
    digest = hashlib.sha256(BODY).hexdigest()
    deadline = time.time() + PATIENCE_S
    state = first("accepted", submit_seq=seq, digest=digest, model=MODEL, priority="high", deadline=deadline)
    twice = "twice"
    accepted = await log.append("a", twice, None, state)
    await log.append("a", twice, accepted, follow(state, "routed", order="decode-only", lane="excess"))
    assert (await client.submit(BODY, model=MODEL, request=twice, priority="high")).seq == seq
    async with asyncio.timeout(PATIENCE_S):
        while twice not in await lanes(bus, "decode"):
            await asyncio.sleep(0.05)
    assert (await lanes(bus, "decode"))[twice] == "excess"
    await bus.close()
