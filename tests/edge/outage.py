"""Requests at a steady rate while one thing breaks in the middle, and the check of everything that came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
from pdq import subjects
from pdq.bus import Bus
from pdq.messages import Event, State

from tests.chaos import plan
from tests.chaos.asking import Asked, Asker
from tests.chaos.check import violations
from tests.chaos.plan import Ask
from tests.chaos.reference import reference
from tests.chaos.run import read
from tests.edge.report import Outage
from tests.edge.scene import SITE, Breakable, Scene

BOUND_S = 120.0
"""How long one request may take beyond what is broken, before it counts as lost."""
SETTLED_S = 30.0

Tick = Callable[[str, int], None]
"""Told, a few times a second, what is being done and how many requests have ended."""


def quietly(doing: str, done: int) -> None:
    """Tells nobody."""


def asks(seed: int, requests: int, rate: float) -> list[Ask]:
    """As in the chaos runs (repeated ones, readers that leave and resume), but none that may end otherwise than by
    its answer."""
    planned = plan.make(seed, requests, rate).asks
    return [msgspec.structs.replace(ask, tenant=SITE, cancel_s=None, deadline_s=None) for ask in planned]


async def outage(
    scene: Scene,
    what: Breakable,
    lasts_s: float,
    *,
    seed: int,
    requests: int,
    rate: float,
    tick: Tick = quietly,
    bound_s: float = BOUND_S,
) -> Outage:
    """Ask at the site; in the middle of it `what` is broken for `lasts_s`."""
    asked = [Asked(ask) for ask in asks(seed, requests, rate)]
    began = time.monotonic()
    async with scene.client() as client:
        asker = Asker(client, bound_s + lasts_s)
        tasks = [asyncio.create_task(asker.run(one, began)) for one in asked]
        breaking = asyncio.create_task(_later(scene, what, max(0.0, requests / rate - lasts_s) / 2, lasts_s))
        try:
            while not all(task.done() for task in (*tasks, breaking)):
                tick(what, sum(task.done() for task in tasks))
                await asyncio.wait((*tasks, breaking), timeout=0.25)
            await breaking
        finally:
            for task in (*tasks, breaking):
                task.cancel()
            await asyncio.gather(*tasks, breaking, return_exceptions=True)
        during = sum(_is_during(one.ask, requests / rate, lasts_s) for one in asked)
        result = Outage(what=what, lasts_s=lasts_s, requests=requests, asked_meanwhile=during)
        async with scene.observer() as bus:
            await _judge(bus, asked, client.seqs, result)
    result.took_s = round(time.monotonic() - began, 1)
    return result


async def _later(scene: Scene, what: Breakable, after_s: float, lasts_s: float) -> None:
    await asyncio.sleep(after_s)
    await scene.break_for(what, lasts_s)


def _is_during(ask: Ask, span_s: float, lasts_s: float) -> bool:
    start = max(0.0, span_s - lasts_s) / 2
    return start <= ask.at_s < start + lasts_s


async def _judge(bus: Bus, asked: Sequence[Asked], seqs: Mapping[str, int], result: Outage) -> None:
    """Compare each answer at the site with the hub's log and with the reference, and look for what nobody asked for."""
    result.left_waiting = await _settle(bus)
    accepted = dict[str, int]()
    for one in asked:
        events = await read(bus, one.ask)
        for line in violations(one, reference(one.ask), events):
            result.failures.append(f"{one.ask.request}: {line}")
        result.answered += one.ended
        for state in _states(events):
            accepted.setdefault(one.ask.request, state.submit_seq)
    result.overtaken = _overtaken(seqs, accepted)
    result.logs = await _logs(bus, asked)


def _states(events: Iterable[Event]) -> list[State]:
    return [event.state for event in events if event.state is not None]


def _overtaken(seqs: Mapping[str, int], accepted: Mapping[str, int]) -> int:
    """Requests that reached the hub before one which the site had accepted earlier."""
    order = [accepted[request] for request in sorted(seqs, key=seqs.__getitem__) if request in accepted]
    return sum(later < earlier for earlier, later in pairwise(order))


async def _settle(bus: Bus) -> int:
    """Messages that are still queued at the hub after a while."""
    give_up = time.monotonic() + SETTLED_S
    while waiting := await _queued(bus):
        if time.monotonic() > give_up:
            return waiting
        await asyncio.sleep(0.2)
    return 0


async def _queued(bus: Bus) -> int:
    infos = [await bus.stream_info(name) for name in (subjects.SUBMIT, subjects.PREFILL, subjects.DECODE)]
    return sum(int(info["state"]["messages"]) for info in infos if info is not None)


async def _logs(bus: Bus, asked: Sequence[Asked]) -> int:
    """How many of the hub's logs are of this run; and none may be of a request that nobody asked for."""
    info = await bus.stream_info(subjects.LOG, "pdq.log.*.*.state")
    known = set((info or {}).get("state", {}).get("subjects") or {})
    run = asked[0].ask.request.split("-")[0]
    strange = [subject for subject in known if not subjects.parse_log(subject).request.startswith(("c", "flow-"))]
    return sum(subjects.parse_log(subject).request.startswith(f"{run}-") for subject in known) + len(strange)
