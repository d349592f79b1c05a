"""`python -m tests.bench.control`: latency and CPU per request of pdq's control path, over its floor.

Both paths run on one nats-server and take turns: in each round the one, then the other, and the next round
begins with the other. A ratio is that of one round; the table shows their median and spread. pdq runs as
real processes with the sim engine, which takes no time; see tests/bench/floor.py for the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench import engine, output
from tests.bench.cpu import cpu_s
from tests.bench.paths import Branch, FloorPath, Pdq, Timing, make_floor_streams
from tests.bench.report import Concurrency, Report, Round, summarise
from tests.bench.shape import Shape, observed

WARM_UP = 20
"""Requests of each path before anything is measured."""
QUIET_LOAD = 1.0

Tick = Callable[[str, int], None]
"""Told what is being done, and how many requests were done since."""


def main() -> int:
    options = _options()
    if (load := os.getloadavg()[0]) > QUIET_LOAD:
        print(f"warning: the load average is {load:.1f}: times will be those of a busy machine", file=sys.stderr)
    logging.getLogger("pdq").setLevel(logging.ERROR)
    total = 2 * options.requests * options.rounds * len(options.at_once)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn between rounds only: a thread that draws would be part of what is measured.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=total)

        def tick(doing: str, done: int) -> None:
            bar.update(task, description=doing, advance=done)
            bar.refresh()

        with (
            tempfile.TemporaryDirectory(prefix="pdq-bench-") as directory,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            report = runner.run(run(options, Path(directory), tick))
    output.put(report, as_json=options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.control", description=__doc__)
    parser.add_argument(
        "--requests", type=int, default=100, help="of each path, in each round, at each concurrency (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="(%(default)s)")
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[1, 16], help="concurrencies: requests at one time (1 16)"
    )
    parser.add_argument("--trace-sample", type=float, default=1.0, help="share of traces recorded (%(default)s)")
    output.add_json(parser)
    options = parser.parse_args()
    if min(options.requests, options.rounds, *options.at_once) < 1:
        parser.error("--requests, --rounds and --at-once must be at least 1")
    return options


async def run(options: argparse.Namespace, directory: Path, tick: Tick) -> Report:
    """Start everything, measure, and end it in any case."""
    load = os.getloadavg()[0]
    async with Pdq(directory, options.trace_sample) as pdq:
        engine_ms = await engine.cpu_ms(directory, options.requests)
        shape = await learn(pdq)
        await make_floor_streams(pdq.bus, pdq.stack.limits.of_streams())
        async with FloorPath(pdq.stack.broker.url, shape) as floor:
            await many(floor, WARM_UP, 1)
            bench = Bench(floor, pdq, options.requests, options.rounds, sum(engine_ms.values()), tick)
            results = [await bench.compare(at_once) for at_once in options.at_once]
    return Report(
        load_before=load,
        load_after=os.getloadavg()[0],
        cores=os.cpu_count() or 1,
        rounds=options.rounds,
        trace_sample=options.trace_sample,
        shape=shape,
        engine_cpu_ms=engine_ms,
        results=results,
    )


async def learn(pdq: Pdq) -> Shape:
    """What a request of pdq's puts on the wire."""
    async with observed(pdq.bus) as observer:
        await many(pdq, WARM_UP, 1)
    return observer.typical()


class Bench:
    """Both paths, taking turns."""

    def __init__(self, floor: FloorPath, pdq: Pdq, requests: int, rounds: int, engine_ms: float, tick: Tick) -> None:
        self._paths: dict[str, Branch] = {"floor": floor, "pdq": pdq}
        self._broker_pid = pdq.broker_pid
        self._requests = requests
        self._rounds = rounds
        self._engine_ms = engine_ms
        self._tick = tick

    async def compare(self, at_once: int) -> Concurrency:
        """All rounds at one concurrency."""
        measured: dict[str, list[Round]] = {name: [] for name in self._paths}
        for number in range(self._rounds):
            order = list(self._paths) if number % 2 == 0 else list(reversed(self._paths))
            for name in order:
                self._tick(f"{name}, {at_once} at a time", 0)
                measured[name].append(await self._round(self._paths[name], at_once))
                self._tick(f"{name}, {at_once} at a time", self._requests)
        return summarise(at_once, measured["floor"], measured["pdq"], self._engine_ms)

    async def _round(self, path: Branch, at_once: int) -> Round:
        pids = {**path.pids, "nats-server": self._broker_pid, "client": os.getpid()}
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        timings = await many(path, self._requests, at_once)
        # What follows an end (its acknowledgement, its timer) belongs to the request.
        await asyncio.sleep(0.05)
        return Round(
            first_s=[timing.first_s for timing in timings],
            end_s=[timing.end_s for timing in timings],
            batches=sum(timing.batches for timing in timings),
            cpu_s={name: cpu_s(pid) - before[name] for name, pid in pids.items()},
        )


async def many(path: Branch, requests: int, at_once: int) -> list[Timing]:
    """That many requests, a number of them at a time."""
    left = iter(range(requests))

    async def ask() -> list[Timing]:
        return [await path.request() for _ in left]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(at_once)]
    return [timing for task in tasks for timing in task.result()]


if __name__ == "__main__":
    sys.exit(main())
