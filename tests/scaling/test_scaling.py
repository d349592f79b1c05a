"""Workers from zero and back, driven by the scaler's own number: nothing is lost, and the trace tells of the start."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client

from tests.ask import Answer, ask
from tests.integration.test_metrics import value
from tests.scaling.driver import of_role
from tests.scaling.run import ROLES, Plan, run, stack_at, too_soon
from tests.secured import SecuredStack
from tests.stack import Service, Stack, completion

START_S = 2.0
PROMPT = "k" * 200


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """A broker, its monitoring, and a router; no worker."""
    stack, monitoring = stack_at(tmp_path_factory.mktemp("scaling"))
    asyncio.run(stack.start())
    yield stack, monitoring
    stack.stop()


async def test_from_zero_to_one_to_zero_by_the_scalers_number(running: tuple[Stack, str]) -> None:
    report = await run(Plan(bursts=(2, 18), span_s=0.3, max_replicas=2), *running)
    assert report.ok, "\n".join(report.lines())
    for role in ROLES:
        numbers = report.changes[role]
        assert numbers[:4] == [0, 1, 0, 1] and max(numbers) == 2 and numbers[-1] == 0, report.lines()
    assert [one.outcome for one in report.requests] == ["finished"] * 20
    assert set(report.bursts[0].cold_starts_s) == set(ROLES), report.lines()
    assert report.given_back, "no busy worker was told to end: this run has shown less than it should"


async def test_workers_that_end_by_themselves(running: tuple[Stack, str]) -> None:
    # All at once: a request that comes later than its worker has waited for no start, and its trace tells of none.
    report = await run(Plan(seed=8, bursts=(3,), span_s=0.1, idle_exit_s=1.0), *running)
    assert report.ok, "\n".join(report.lines())
    assert {role: report.changes[role] for role in ROLES} == {role: [0, 1, 0] for role in ROLES}
    assert set(report.bursts[0].cold_starts_s) == set(ROLES), report.lines()
    # `too_soon`, which has found nothing with a driver that ends workers, does find a request that is open meanwhile.
    zero = next(row for before, row in pairwise(of_role(report.rows, "decode")) if before.replicas and not row.replicas)
    report.began = report.requests[0].needs["decode"][1] - 0.001 - zero.at_s
    assert len(too_soon(report)) >= 1


async def test_prefill_that_does_not_come(tmp_path: Path) -> None:
    """Requests wait for its start and no longer; then decode computes their prompts, and one job goes on asking."""
    # With accounts: the router may do no more than it is allowed.
    stack = SecuredStack(tmp_path, ["acme"], PDQ_ROUTER_PREFILL_START_S=f"{START_S:g}")
    router, _ = stack.add("pdq_router"), stack.add("pdq_decode")
    try:
        await stack.start()
        bus, own = await stack.connect("router"), await stack.connect("acme")
        client = Client(own, "acme")
        first, second = await asyncio.gather(asked(client, deadline_s=6.0), asked(client, deadline_s=6.0))
        for answer in (first, second):
            assert answer.story == ["accepted", "routed", "prefilled", "claim", "finished"]
            assert (answer.state.order, answer.state.reason) == ("prefill-first", "default")
            assert answer.state.promise.cause == answer.state.local == "no_prefill_worker"
            assert answer.state.at - answer.state.submitted > START_S
        assert fell_back(router) == 2
        # The other one of them is still queued, and says that nobody came in time.
        assert await waiting(bus) == 1
        third = await asked(client)
        assert (third.state.order, third.state.reason) == ("decode-only", "no_prefill_worker")
        # It asks until its deadline; then prefill is given a chance again.
        await until_waiting(bus, 0)
        fourth = asyncio.create_task(asked(client))
        await until_waiting(bus, 1)
        assert (await fourth).state.local == "no_prefill_worker"
        # A worker that comes after all finds nothing to do for it, and does what comes now.
        prefill = stack.add("pdq_prefill")
        prefill.start()
        prefill.wait_ready()
        await until_waiting(bus, 0)
        await asyncio.sleep(1.1)  # the router looks at workers once a second
        fifth = await asked(client)
        assert fifth.story == ["accepted", "routed", "claim", "prefilled", "claim", "finished"]
        assert fifth.state.kv.promised_tokens and not fifth.state.local
        await bus.close()
        await own.close()
    finally:
        stack.stop()


async def asked(client: Client, **options: float) -> Answer:
    return await ask(client, completion(PROMPT, max_tokens=4, temperature=0, ignore_eos=True), **options)


def fell_back(service: Service) -> float:
    return value(service, "pdq_order_fallbacks_total", cause="no_prefill_worker")


async def waiting(bus: Bus) -> int:
    info = await bus.stream_info(subjects.PREFILL)
    return int((info or {})["state"]["messages"])


async def until_waiting(bus: Bus, wanted: int) -> None:
    async with asyncio.timeout(20):
        while await waiting(bus) != wanted:
            await asyncio.sleep(0.05)
