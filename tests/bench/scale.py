"""`python -m tests.bench.scale`: what a request costs with 10, 100, 1,000 workers, against the floor in the same run.

Real broker, router, log and client; the workers are sim workers, half of each stage, many to a process
(tests/bench/herd.py). Requests come at a constant rate, open loop; each prompt is another, so that no worker is
preferred. In turns with pdq, the floor (one process of each role) takes the same load on the same broker. What workers
cost that have nothing to do is measured first: the CPU of a request is what the load adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import uvloop
from pdq.settings import LimitSettings

from tests.bench.control import WARM_UP, _cpu_s, _learn, _many
from tests.bench.paths import Branch, FloorPath, Pdq, Timing, make_floor_streams
from tests.bench.stats import percentile

PER_PROCESS = 100
SETTLE_S = 3.0
IDLE_S = 20.0
"""Idle workers make their pulls anew so often, all that were started together at one time: rounds last as long."""
READY_S = 120.0
STAGES = ("prefill", "decode")
Spent = dict[str, float]
"""CPU seconds by group of processes."""


class Figures(msgspec.Struct, frozen=True):
    """One path at one number of workers. Milliseconds; `cpu_ms` is per request and by group of processes."""

    requests: int
    first_p50: float
    first_p99: float
    end_p50: float
    end_p99: float
    cpu_ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.cpu_ms.values())


class Size(msgspec.Struct, frozen=True):
    """Both paths at one number of workers. idle_cpu: cores that pdq takes with nothing to do, by group."""

    workers: int
    idle_cpu: dict[str, float]
    floor: Figures
    pdq: Figures


class Report(msgspec.Struct, frozen=True):
    load_before: float
    rate: float
    seconds: float
    sizes: list[Size]

    def lines(self) -> list[str]:
        """The summary as text."""
        lines = [f"load average {self.load_before:.1f} before; {self.rate:g} requests/s for {self.seconds:g} s a round"]
        for size in self.sizes:
            lines += ["", f"{size.workers} workers; idle: {_cpus(size.idle_cpu, 'cores', 1)}"]
            lines += [_line("floor", size.floor), _line("pdq", size.pdq)]
        first, last = self.sizes[0], self.sizes[-1]
        ratio = last.pdq.total_ms / first.pdq.total_ms
        return [*lines, "", f"CPU per request, {last.workers} workers over {first.workers}: {ratio:.2f}"]


def _line(name: str, figures: Figures) -> str:
    added = f"first token {figures.first_p50:.1f} / {figures.first_p99:.1f}, end {figures.end_p50:.1f} / "
    total = f"{figures.total_ms:.2f} ms of CPU a request"
    return f"  {name:<6}{added}{figures.end_p99:.1f} ms (p50 / p99); {total}: {_cpus(figures.cpu_ms, 'ms', 2)}"


def _cpus(groups: Mapping[str, float], unit: str, digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in groups.items()) + f" {unit}"


class Herds:
    """Processes of workers, which only become more."""

    def __init__(self, pdq: Pdq) -> None:
        self._pdq = pdq
        self._processes: dict[str, list[subprocess.Popen[str]]] = {stage: [] for stage in STAGES}
        self._workers = dict.fromkeys(STAGES, 0)

    async def grow(self, workers: int) -> None:
        """Until there are so many, half of each stage."""
        started = []
        for stage in STAGES:
            while (missing := workers // 2 - self._workers[stage]) > 0:
                started.append(self._start(stage, min(missing, PER_PROCESS)))
        async with asyncio.timeout(READY_S):
            for process in started:
                assert process.stdout is not None
                line = await asyncio.to_thread(process.stdout.readline)
                assert line == "ready\n", f"a herd did not start: exit code {process.poll()}"

    def _start(self, stage: str, count: int) -> subprocess.Popen[str]:
        number = len(self._processes[stage])
        environment = self._pdq.stack.environment(f"herd-{stage}-{number}")
        command = [sys.executable, "-m", "tests.bench.herd", stage, str(count)]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._processes[stage].append(process)
        self._workers[stage] += count
        return process

    @property
    def pids(self) -> dict[str, list[int]]:
        return {stage: [process.pid for process in each] for stage, each in self._processes.items()}

    def stop(self) -> None:
        processes = [process for each in self._processes.values() for process in each]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


class Scale:
    """Both paths, in turns, at growing numbers of workers."""

    def __init__(self, pdq: Pdq, floor: FloorPath, herds: Herds, options: argparse.Namespace) -> None:
        self._pdq = pdq
        self._floor = floor
        self._herds = herds
        self._rate: float = options.rate
        self._seconds: float = options.seconds
        self._rounds: int = options.rounds

    async def at(self, workers: int) -> Size:
        print(f"{workers} workers", file=sys.stderr)
        await self._herds.grow(workers)
        await _many(self._pdq, WARM_UP, 4)
        await asyncio.sleep(SETTLE_S)
        idle = await self._idle()
        rounds: dict[str, list[tuple[list[Timing], Spent]]] = {"floor": [], "pdq": []}
        for number in range(self._rounds):
            for name in ("floor", "pdq") if number % 2 == 0 else ("pdq", "floor"):
                rounds[name].append(await self._round(self._floor if name == "floor" else self._pdq))
        # Idle workers cost the broker as much in the floor's rounds; the floor's own processes have nothing to do then.
        shared = {name: idle[name] for name in ("nats-server", "client")}
        return Size(workers, idle, self._figures(rounds["floor"], shared), self._figures(rounds["pdq"], idle))

    async def _idle(self) -> Spent:
        before = self._spent(self._pdq)
        await asyncio.sleep(IDLE_S)
        return {name: (spent - before[name]) / IDLE_S for name, spent in self._spent(self._pdq).items()}

    async def _round(self, path: Branch) -> tuple[list[Timing], Spent]:
        before, tasks = self._spent(path), []
        async with asyncio.TaskGroup() as group:
            for _ in range(round(self._rate * self._seconds)):
                tasks.append(group.create_task(path.request()))
                await asyncio.sleep(1 / self._rate)
        after = self._spent(path)
        return [task.result() for task in tasks], {name: after[name] - before[name] for name in after}

    def _spent(self, path: Branch) -> Spent:
        groups = {"nats-server": [self._pdq.broker_pid], "client": [os.getpid()]}
        if path is self._floor:
            groups = {**{name: [pid] for name, pid in path.pids.items()}, **groups}
        else:
            groups = {"router": [path.pids["router"]], **self._herds.pids, **groups}
        return {name: sum(map(_cpu_s, pids)) for name, pids in groups.items()}

    def _figures(self, rounds: Sequence[tuple[list[Timing], Spent]], idle: Spent) -> Figures:
        timings = [timing for each, _ in rounds for timing in each]
        cpu = dict.fromkeys(rounds[0][1], 0.0)
        for _, spent in rounds:
            for name, cpu_s in spent.items():
                cpu[name] += cpu_s - idle.get(name, 0.0) * self._seconds
        firsts = [timing.first_s * 1e3 for timing in timings]
        ends = [timing.end_s * 1e3 for timing in timings]
        return Figures(
            len(timings),
            percentile(firsts, 0.5),
            percentile(firsts, 0.99),
            percentile(ends, 0.5),
            percentile(ends, 0.99),
            {name: cpu_s * 1e3 / len(timings) for name, cpu_s in cpu.items()},
        )


async def run(options: argparse.Namespace, directory: Path) -> Report:
    """Start everything, measure, and end it in any case."""
    load = os.getloadavg()[0]
    async with Pdq(directory, options.trace_sample, ("router",), alike=False) as pdq:
        herds = Herds(pdq)
        try:
            await herds.grow(min(options.workers))
            shape = await _learn(pdq)
            await make_floor_streams(pdq.bus, LimitSettings().of_streams())
            async with FloorPath(pdq.stack.broker.url, shape) as floor:
                await _many(floor, WARM_UP, 1)
                scale = Scale(pdq, floor, herds, options)
                sizes = [await scale.at(workers) for workers in options.workers]
        finally:
            await asyncio.to_thread(herds.stop)
    return Report(load, options.rate, options.seconds, sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1_000], help="ascending (10 100 1000)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second (%(default)g)")
    parser.add_argument("--seconds", type=float, default=IDLE_S, help="of a round (%(default)g)")
    parser.add_argument("--rounds", type=int, default=2, help="of each path, at each number (%(default)s)")
    parser.add_argument("--trace-sample", type=float, default=1.0, help="share of traces recorded (%(default)g)")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on stdout")
    options = parser.parse_args(arguments)
    if min(options.rate, options.seconds, options.rounds) <= 0 or min(options.workers) < 2:
        parser.error("--rate, --seconds and --rounds must be above 0, --workers at least 2")
    options.workers.sort()
    logging.getLogger("pdq").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory(prefix="pdq-scale-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(run(options, Path(directory)))
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print("\n".join(report.lines()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
