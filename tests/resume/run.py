"""One run: what each request is answered with in calm; then the rounds, with all that happens in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from pdq.client import Client

from tests.ask import read_all
from tests.resume.asking import Asked, Asker
from tests.resume.check import cancelled, violations
from tests.resume.deaths import Deaths
from tests.resume.plan import Ask, Plan
from tests.resume.report import Report
from tests.resume.scene import Scene
from tests.resume.told import Told

BOUND_S = 120.0
"""How long one request may take, with deaths all around."""
AT_ONCE = 16
"""Requests in calm at one time."""

Progress = Callable[[Report], None]
"""Told after each round."""


async def run(plan: Plan, scene: Scene, progress: Progress = lambda report: None, bound_s: float = BOUND_S) -> Report:
    """Carry out a plan on a scene whose stack is started."""
    report, began = Report(seed=plan.seed), time.monotonic()
    calm = await in_calm([ask for each in plan.rounds for ask in each.asks if ask.leaves is None], scene, bound_s)
    bus = await scene.stack.connect()
    client = Client(bus, "local")
    try:
        for each in plan.rounds:
            asked = [Asked(ask, calm[ask.key].size if ask.key in calm else 0) for ask in each.asks]
            await carry_out(asked, Deaths(asked, scene, client, each.broker_dies), scene, bound_s)
            await scene.ready()
            for one in asked:
                await judge(one, calm, scene, client, report)
            report.killed = dict(scene.done)
            progress(report)
    finally:
        await bus.close()
    report.troubles = scene.troubles()
    report.duration_s = round(time.monotonic() - began, 1)
    return report


async def in_calm(asks: Sequence[Ask], scene: Scene, bound_s: float) -> dict[str, Told]:
    """What each is answered with when nothing happens, by key. Raises AssertionError where that fails."""
    asker, gate = Asker(scene.urls, bound_s), asyncio.Semaphore(AT_ONCE)

    async def once(ask: Ask) -> Told:
        asked = Asked(msgspec.structs.replace(ask, key=f"calm {ask.key}", cuts=()))
        async with gate:
            await asker.run(asked)
        outcomes = [leg.outcome for leg in asked.legs if leg.events]
        assert not asked.error and outcomes == ["done"], (ask.key, asked.error, asked.legs)
        return asked.told

    return dict(zip((ask.key for ask in asks), await asyncio.gather(*map(once, asks)), strict=True))


async def carry_out(asked: Sequence[Asked], deaths: Deaths, scene: Scene, bound_s: float) -> None:
    """All requests of a round, and what dies meanwhile."""
    asker = Asker(scene.urls, bound_s, scene.quiet)
    dying = asyncio.create_task(deaths.run())
    try:
        await asyncio.gather(*map(asker.run, asked))
        await dying
    finally:
        dying.cancel()
        await asyncio.wait({dying})


async def judge(asked: Asked, calm: dict[str, Told], scene: Scene, client: Client, report: Report) -> None:
    stored = await Asker(scene.urls, BOUND_S).whole(asked)
    if asked.ask.leaves is not None:
        report.count(asked, (), cancelled(asked, stored))
        return
    logs = [await read_all(client, request) for request in asked.requests]
    found = violations(asked, calm[asked.ask.key], stored)
    found += [f"the log of {log.request} ends with {log.terminal}" for log in logs if log.terminal != ["finished"]]
    report.count(asked, [log.events for log in logs], found)
