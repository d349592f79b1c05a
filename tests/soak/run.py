"""One soak: a stack under load, its processes watched, then everything at rest, then every gauge at zero."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.settings import LimitSettings

from tests.chaos.plan import TENANTS
from tests.soak import load, samples
from tests.soak.asking import Asking
from tests.soak.load import WINDOW_S, Workers
from tests.soak.report import Report
from tests.soak.watching import Watching
from tests.stack import Service, Stack

SAMPLE_S = 5.0
SETTLE_S = 60.0
"""How long it may take, after the last end and the longest deadline, until nothing is left to do."""
EXPIRE_S = 60.0
"""How long after its age the log may still hold something."""
KNOWN_POSITIONS = 4_000
"""More than the prompts of a log's age have: the router's memory is full before it is measured."""
BROKER = {"GOGC": "20", "GOMEMLIMIT": "32MiB"}
"""Go lets garbage grow to so many percent of what is in use before it collects. By default to 100, which moves the
broker's memory by 8 MB up and down: a slope of 1 MB in 10 minutes would be lost in it. Above the limit it gives back to
the system what it does not use."""

Progress = Callable[[str, float, float], None]
"""Told what goes on, how many seconds of it are over, and how many it takes at most."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """`rate`: good requests a second; None: half of what the stack could take."""

    minutes: float
    warm_up_minutes: float
    seed: int
    rate: float | None = None
    prefill: Workers = Workers(2, 8, "llama2-70b-h100-tp8*10")
    decode: Workers = Workers(2, 8, "llama3-8b-h100*4")
    limits: LimitSettings = LimitSettings(
        log_age_s=300, max_deadline_s=60, max_deliver=20, ack_wait_s=4, worker_ttl_s=30
    )
    sample_s: float = SAMPLE_S
    expire: bool = True
    """Whether to wait, in the end, until the log has emptied."""


async def run(setup: Setup, directory: Path, progress: Progress = lambda what, done, of: None) -> Report:
    """Soak in an empty directory. Whatever happens, no process is left behind. Raises AssertionError when the stack
    does not start, or a process ends by itself."""
    capacity = load.capacity(setup.seed, setup.prefill, setup.decode)
    report = Report(
        seed=setup.seed,
        minutes=setup.minutes,
        warm_up_minutes=setup.warm_up_minutes,
        rate=setup.rate or round(capacity.rate / 2, 2),
        capacity=capacity._asdict(),
    )
    stack, named = build(setup, directory)
    progress("starting", 0, 1)
    try:
        await stack.start()
        await _watched(setup, stack, named, report, progress)
    finally:
        await asyncio.to_thread(stack.stop)
    for name, service in named.items():
        if service.process is not None and service.process.returncode != 0:
            report.unsettled.append(f"{name} ended with {service.process.returncode}")
    return report


def build(setup: Setup, directory: Path) -> tuple[Stack, dict[str, Service]]:
    """The stack, not started, and its services by name."""
    limits = setup.limits
    stack = Stack(
        directory,
        limits=limits,
        PDQ_LIMIT_LOG_AGE_S=str(limits.log_age_s),
        PDQ_LIMIT_MAX_DEADLINE_S=str(limits.max_deadline_s),
        PDQ_LIMIT_MAX_DELIVER=str(limits.max_deliver),
    )
    stack.broker.environment |= BROKER
    named = {"router": stack.add("pdq_router", PDQ_ROUTER_KNOWN_POSITIONS=str(KNOWN_POSITIONS))}
    for role, workers in (("prefill", setup.prefill), ("decode", setup.decode)):
        for number in range(workers.number):
            named[f"{role}-{number}"] = stack.add(
                f"pdq_{role}",
                PDQ_WORKER_ID=f"{role}-{number}",
                PDQ_WORKER_SLOTS=str(workers.slots),
                PDQ_ENGINE_SIM_PROFILE=workers.profile,
            )
    return stack, named


async def _watched(setup: Setup, stack: Stack, named: dict[str, Service], report: Report, progress: Progress) -> None:
    """The soak and its watch, side by side, until the first of them is over."""
    buses = [await stack.connect() for _ in ("operator", *TENANTS)]
    clients = {tenant: Client(bus, tenant) for tenant, bus in zip(TENANTS, buses[1:], strict=True)}
    watching = _watching(setup, stack, named)
    soak = Soak(setup, buses[0], Asking(clients, buses[0], setup.limits, report), watching, report, progress)
    watch, work = asyncio.create_task(watching.run(setup.sample_s)), asyncio.create_task(soak.run())
    try:
        await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            raise AssertionError(f"a process ended by itself: {watch.exception()!r}")
        await work
    finally:
        for task in (watch, work):
            task.cancel()
        await asyncio.gather(watch, work, return_exceptions=True)
        for bus in buses:
            await bus.close()


def _watching(setup: Setup, stack: Stack, named: dict[str, Service]) -> Watching:
    pids = {name: service.process.pid for name, service in named.items() if service.process is not None}
    assert stack.broker.process is not None
    pids |= {"nats-server": stack.broker.process.pid, "client": os.getpid()}
    taken = samples.Samples(stack.directory / "samples.csv", pids)
    slots = {"prefill": setup.prefill.slots, "decode": setup.decode.slots}
    return Watching(taken, named, slots, stack.directory / "kv", setup.limits.log_age_s)


class Soak:
    """Load, then rest, on a stack that runs. `bus`: an operator's."""

    def __init__(
        self, setup: Setup, bus: Bus, asking: Asking, watching: Watching, report: Report, progress: Progress
    ) -> None:
        self._setup = setup
        self._bus = bus
        self._asking = asking
        self._watching = watching
        self._report = report
        self._progress = progress

    async def run(self) -> None:
        """Fills in the report."""
        loading = asyncio.create_task(self._load())
        try:
            while not loading.done():
                self._tell()
                await asyncio.wait({loading}, timeout=1)
            await loading
        finally:
            loading.cancel()
        self._measure()
        await self._come_to_rest()

    def _tell(self) -> None:
        lasts_s = self._setup.minutes * 60
        told = f"{self._asking.ended} ended, {self._report.num_wrong} wrong"
        self._progress(told, min(self._watching.now_s, lasts_s), lasts_s)

    async def _load(self) -> None:
        """All windows, one after the other; returns when the last request is checked."""
        began, seed, rate = time.monotonic(), self._setup.seed, self._report.rate
        async with asyncio.TaskGroup() as group:
            for window in range(max(1, round(self._setup.minutes * 60 / WINDOW_S))):
                starts = began + window * WINDOW_S
                await asyncio.sleep(max(0.0, starts - time.monotonic()))
                for ask in load.asks(seed, window, rate):
                    group.create_task(self._asking.good(ask, starts))
                for bad in load.bads(seed, window, rate):
                    group.create_task(self._asking.bad_one(bad, starts))

    def _measure(self) -> None:
        begin, end = self._setup.warm_up_minutes * 60, self._setup.minutes * 60
        by_process = samples.read(self._watching.samples.path)
        measured = {name: [one for one in taken if begin <= one.at_s <= end] for name, taken in by_process.items()}
        report, asking = self._report, self._asking
        report.measure(measured)
        report.busy = self._watching.busy()
        report.outcomes, report.bad = dict(asking.outcomes), dict(asking.bad)

    async def _come_to_rest(self) -> None:
        """Every gauge to zero; then, with its age, the log."""
        report, limits = self._report, self._setup.limits
        report.unsettled += [f"{name} was never above 0" for name in self._watching.never_moved()]
        report.unsettled += await self._until_zero("settling", limits.max_deadline_s + SETTLE_S, log=False)
        if self._setup.expire:
            report.unsettled += await self._until_zero("the log ages", limits.log_age_s + EXPIRE_S, log=True)
        info = await self._bus.stream_info(subjects.DEAD)
        report.dead_letters = int((info or {}).get("state", {}).get("messages", 0))
        if report.dead_letters != self._asking.dead_letters:
            report.unsettled.append(f"{report.dead_letters} dead letters, but {self._asking.dead_letters} are due")

    async def _until_zero(self, what: str, bound_s: float, *, log: bool) -> list[str]:
        """What is not zero after `bound_s`, of each service. `log`: of the log, too."""
        began = time.monotonic()
        while True:
            left = await self._watching.not_zero(log)
            over = time.monotonic() - began
            if not left or over > bound_s:
                return left
            self._progress(what, over, bound_s)
            await asyncio.sleep(1)
