"""Whole upgrades, each under a stream of requests: release by release and back, in every order of services."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from tests.chaos.plan import ORDERS
from tests.upgrade import builds
from tests.upgrade.builds import Build
from tests.upgrade.fleet import (
    GATEWAYS_FIRST,
    MODULES,
    READERS_FIRST,
    ROUTER_FIRST,
    WORKERS_FIRST,
    Fleet,
    look,
    violations,
)
from tests.upgrade.traffic import Traffic

PAUSE_S = 3.0
"""After each service, at most: where a release was passed over, requests wait for the next one."""

Told = Callable[[str], None]
Roll = tuple[Build, Sequence[int]]
"""What build comes next, and to which services, in order."""


class Report(msgspec.Struct, kw_only=True):
    """What came of one upgrade."""

    name: str
    requests: int
    replaced: int
    """Services."""
    seconds: float
    again: int
    """Requests that met a gateway as it went, and were asked again."""
    crossed: int
    """Requests that more than one build has worked on."""
    continued: int
    """Of these, answers that one build began and another went on with."""
    records: dict[str, int]
    violations: list[str]

    @property
    def line(self) -> str:
        records = ", ".join(f"{count} {name}" for name, count in sorted(self.records.items()) if count)
        return (
            f"{self.name}: {self.requests} requests, {len(self.violations)} wrong, {self.again} asked again; "
            f"{self.replaced} services replaced in {self.seconds:.0f} s; "
            f"{self.crossed} requests crossed builds, {self.continued} in mid-answer; records: {records}"
        )


def upgrades(directory: Path) -> dict[str, tuple[Build, list[Roll]]]:
    """By name: the build that is there, and what comes after it."""
    now = builds.present()
    reads = builds.made("reads", directory, builds.more_fields, builds.reads_two)
    writes = builds.made("writes", directory, builds.more_fields, builds.reads_two, builds.writes_two)
    there = [(reads, ROUTER_FIRST), (writes, ROUTER_FIRST)]
    half = len(MODULES) // 2
    return {
        "router first, and all the way back": (now, [*there, (reads, GATEWAYS_FIRST), (now, GATEWAYS_FIRST)]),
        "workers first, rolled back half-way": (
            now,
            [(reads, WORKERS_FIRST), (writes, WORKERS_FIRST[:half]), (reads, WORKERS_FIRST[:half])],
        ),
        "a release passed over": (now, [(writes, READERS_FIRST)]),
        "gateways first": (now, [(reads, GATEWAYS_FIRST), (writes, GATEWAYS_FIRST)]),
    }


def between(old: Path) -> dict[str, tuple[Build, list[Roll]]]:
    """From an earlier release's working tree to the present one and back; `pdq init` of the present one comes first."""
    before, now = builds.checkout(old), builds.present()
    return {
        "router first": (before, [(now, ROUTER_FIRST), (before, GATEWAYS_FIRST)]),
        "workers first": (before, [(now, WORKERS_FIRST), (before, WORKERS_FIRST)]),
    }


async def run(
    name: str, directory: Path, first: Build, rolls: Sequence[Roll], told: Told, orders: Collection[str] = ORDERS
) -> Report:
    """Carry one out in an empty directory, with requests of `orders`. Whatever happens, no process is left behind."""
    fleet, began, replaced = Fleet(directory, first), time.monotonic(), 0
    try:
        await fleet.stack.start()
        async with Traffic(fleet.gateways, seed=len(name), orders=orders) as traffic:
            for build, places in rolls:
                for place in places:
                    await fleet.replace(place, build)
                    replaced += 1
                    told(f"{name}: {MODULES[place]} is {build.name}, {traffic.ended} requests")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(traffic.more(3), PAUSE_S)
        seen = await look(fleet)
    finally:
        await asyncio.to_thread(fleet.stack.stop)
    return Report(
        name=name,
        requests=len(traffic.asked),
        replaced=replaced,
        seconds=time.monotonic() - began,
        again=traffic.again,
        crossed=seen.crossed,
        continued=seen.continued,
        records=dict(seen.records),
        violations=violations(traffic.asked, seen),
    )
