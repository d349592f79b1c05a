"""One run: a cluster, the requests and the faults of a plan, then the check of everything that is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.log import RequestLog
from pdq.messages import Event

from tests.chaos.asking import Asked, Asker
from tests.chaos.check import violations
from tests.chaos.cluster import LIMITS, Cluster
from tests.chaos.faults import Faults
from tests.chaos.plan import TENANTS, Ask, Plan
from tests.chaos.reference import reference
from tests.chaos.report import Failure, Report, log_lines

BOUND_S = 180.0
"""How long one request may take, with faults all around, before it counts as lost."""
QUIET_S = 60.0
"""How long the queues may take to empty after the last end."""

Progress = Callable[[int, "Faults"], None]
"""Told, a few times a second, how many requests have ended, and of the faults done."""


async def run(plan: Plan, directory: Path, progress: Progress = lambda ended, faults: None) -> Report:
    """Carry out a plan in an empty directory. Whatever happens, no process is left behind."""
    report = Report(seed=plan.seed, requests=len(plan.asks))
    began = time.monotonic()
    cluster = Cluster(directory)
    try:
        await cluster.start()
        faults = Faults(cluster)
        asked = await carry_out(plan, cluster, faults, progress)
        report.count_faults(faults.done)
        report.skipped = faults.skipped
        await settle(cluster)
        await judge(cluster, asked, report)
        await cluster.stop()
    finally:
        await cluster.abandon()
    report.troubles = cluster.troubles
    report.duration_s = round(time.monotonic() - began, 1)
    return report


async def carry_out(plan: Plan, cluster: Cluster, faults: Faults, progress: Progress) -> list[Asked]:
    """All requests and all faults; returns when the last request has ended and the last fault is undone."""
    started = time.monotonic()
    buses = {tenant: await cluster.connect(cluster.proxies[f"client-{tenant}"].url, tenant) for tenant in TENANTS}
    try:
        askers = {tenant: Asker(Client(bus, tenant), BOUND_S) for tenant, bus in buses.items()}
        breaking = asyncio.create_task(faults.run(plan.faults, started))
        asked = [Asked(ask) for ask in plan.asks]
        asking = [asyncio.create_task(askers[one.ask.tenant].run(one, started)) for one in asked]
        watching = asyncio.create_task(_watch(asking, faults, progress))
        try:
            await asyncio.gather(*asking)
            await breaking
        finally:
            for task in (watching, breaking, *asking):
                task.cancel()
            await asyncio.gather(watching, breaking, *asking, return_exceptions=True)
        return asked
    finally:
        for bus in buses.values():
            await bus.close()


async def _watch(asking: Sequence[asyncio.Task[None]], faults: Faults, progress: Progress) -> None:
    while True:
        progress(sum(task.done() for task in asking), faults)
        await asyncio.sleep(0.25)


async def settle(cluster: Cluster) -> None:
    """Wait until nothing is queued, and then as long as a late writer may take; what stays is trouble."""
    bus = await cluster.connect()
    try:
        give_up = time.monotonic() + QUIET_S
        while waiting := await _waiting(bus):
            if time.monotonic() > give_up:
                cluster.troubles.append(f"still queued after {QUIET_S:g} s: {waiting}")
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(2 * LIMITS.ack_wait_s)
        if dead := await _messages(bus, subjects.DEAD):
            cluster.troubles.append(f"{dead} dead letters")
    finally:
        await bus.close()


async def judge(cluster: Cluster, asked: Sequence[Asked], report: Report) -> None:
    """Read every log and add to the report what is wrong with it."""
    bus = await cluster.connect()
    try:
        logs = [await read(bus, one.ask) for one in asked]
        known = await _requests(bus)
    finally:
        await bus.close()
    report.count_logs(logs)
    for one, events in zip(asked, logs, strict=True):
        known.discard(subjects.state(one.ask.tenant, one.ask.request))
        if found := violations(one, reference(one.ask), events):
            report.failures.append(Failure(f"{one.ask.tenant}/{one.ask.request}", found, log_lines(events)))
    cluster.troubles += [f"a log that nobody asked for: {subject}" for subject in sorted(known)]


async def read(bus: Bus, ask: Ask) -> list[Event]:
    """A request's whole log, from the stream itself."""
    log, events = RequestLog(bus), list[Event]()
    while True:
        page = await log.read(ask.tenant, ask.request, after=events[-1].seq if events else 0, limit=1_000)
        events += page.events
        if not page.more:
            return events


async def _requests(bus: Bus) -> set[str]:
    info = await bus.stream_info(subjects.LOG, "pdq.log.*.*.state")
    return set((info or {}).get("state", {}).get("subjects") or {})


async def _waiting(bus: Bus) -> dict[str, int]:
    streams = (subjects.SUBMIT, subjects.PREFILL, subjects.DECODE)
    counts = {stream: await _messages(bus, stream) for stream in streams}
    return {stream: count for stream, count in counts.items() if count}


async def _messages(bus: Bus, stream: str) -> int:
    info = await bus.stream_info(stream)
    return int((info or {}).get("state", {}).get("messages", 0))
