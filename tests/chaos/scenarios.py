"""Faults for certain: what a random run meets by chance, made to happen, to show what a missing guard does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdq.client import Client

from tests.chaos.asking import Asked, Asker
from tests.chaos.check import violations
from tests.chaos.cluster import Cluster
from tests.chaos.plan import TENANTS, Ask
from tests.chaos.reference import reference
from tests.chaos.run import read

BOUND_S = 45.0
FIRST, SECOND = "decode-0", "decode-1"
NAMES = ("router-0", FIRST, SECOND)

Act = Callable[[Cluster, Sequence[Asked]], Awaitable[None]]


async def cut_off(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """A worker loses the broker in mid-answer, another takes over, and the first comes back with a whole answer."""
    await shown(asked, 10)
    cluster.proxies[FIRST].cut()
    cluster.nodes[SECOND].start()
    await taken_over(asked)
    # By now the first one's engine is done: it was given a shorter time for all than the take-over takes.
    cluster.proxies[FIRST].heal()


async def killed(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """A worker dies in mid-answer, and another takes over."""
    await shown(asked, 20)
    cluster.nodes[FIRST].kill()
    cluster.nodes[SECOND].start()


async def broker_killed(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """The broker dies in mid-answer, and comes back with its store."""
    await shown(asked, 10)
    await cluster.at_broker(cluster.broker.kill)
    await asyncio.sleep(0.3)
    await cluster.at_broker(cluster.broker.start)


async def blink(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """What a worker sends in mid-answer is lost for a moment, which is over before its jobs are anybody else's."""
    await shown(asked, 10)
    cluster.proxies[FIRST].silent()
    await asyncio.sleep(0.3)
    cluster.proxies[FIRST].heal()


async def nothing(cluster: Cluster, asked: Sequence[Asked]) -> None:
    """All goes well."""


async def play(
    directory: Path,
    act: Act,
    *,
    mutations: Mapping[str, str] | None = None,
    profiles: Mapping[str, str] | None = None,
    requests: int = 1,
    **fields: Any,
) -> list[str]:
    """Ask, act, wait for the ends, and return what is wrong with any of the requests."""
    cluster = Cluster(directory, NAMES, mutations, profiles)
    try:
        await cluster.start(later=[SECOND])
        bus = await cluster.connect()
        try:
            asks = [ask(number, **fields) for number in range(requests)]
            asked = [Asked(one) for one in asks]
            asker = Asker(Client(bus, TENANTS[0]), BOUND_S)
            running = [asyncio.create_task(asker.run(one, 0.0)) for one in asked]
            await asyncio.wait_for(act(cluster, asked), BOUND_S)
            await asyncio.gather(*running)
            # What a worker that should be quiet still writes comes now.
            await asyncio.sleep(0.5)
            logs = [await read(bus, one) for one in asks]
        finally:
            await bus.close()
    finally:
        await cluster.abandon()
    return [
        found for one, events in zip(asked, logs, strict=True) for found in violations(one, reference(one.ask), events)
    ]


def ask(number: int, **fields: Any) -> Ask:
    """A request of about `max_tokens` tokens that goes straight to decode."""
    return Ask(
        request=f"scenario-{number}",
        tenant=TENANTS[0],
        at_s=0.0,
        shape="ids",
        prompt=tuple(range(100 + number, 120 + number)),
        fields={"ignore_eos": True, **fields},
        priority="normal",
        order="decode-only",
        deadline_s=None,
        cancel_s=None,
        again_s=None,
        leave_s=None,
    )


async def shown(asked: Sequence[Asked], tokens: int) -> None:
    """Until the reader of each request has so many tokens."""
    while any(one.num_tokens < tokens for one in asked):
        await asyncio.sleep(0.01)


async def taken_over(asked: Sequence[Asked]) -> None:
    """Until each request has tokens of a second attempt."""
    while not all(any(event.out and event.out.attempt == 2 for event in one.seen) for one in asked):
        await asyncio.sleep(0.01)
