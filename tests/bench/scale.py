"""`python -m tests.bench.scale`: what a request costs with 10, 100, 1,000 workers, and how many a second are sustained.

Real broker, router, log and client; the workers are sim workers with a published timing model, half of each stage, in
as many processes whatever their number (tests/bench/workers.py). Requests come at a constant rate, open loop, and
latencies count from when each was due; each prompt is another, so that no worker is preferred. In turns with pdq, the
floor (one process of each role, tests/bench/floor.py) takes the same load on the same broker, and nobody does: the CPU
of a request is what the load adds to that. Then each path's rate is raised until latency runs away.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop
from pdq.settings import LimitSettings

from tests.bench import engine, output, scale_report
from tests.bench.control import WARM_UP, learn, many
from tests.bench.cpu import Meter, limit
from tests.bench.load import Answer, offer
from tests.bench.paths import Branch, FloorPath, Pdq, make_floor_streams
from tests.bench.saturation import Saturation, Trial, search
from tests.bench.scale_report import Report, Round, Size
from tests.bench.stats import percentile
from tests.bench.workers import Herds

SETTLE_S = 3.0
BREATH_S = 1.0
"""Between rounds, so that what follows an end belongs to its own."""
BOUND_S = 0.5
ALONE_REPEATS = 10
START = 1.3
"""Times the rate at which all cores would be full by the rounds' CPU per request, the first that is tried: a request
takes less where there are many."""
PATHS = ("floor", "pdq")
NOTHING = Answer(0.0, 0.0)
Spent = dict[str, float]
"""CPU seconds by group of processes."""


class Scale:
    """Both paths, in turns, at growing numbers of workers. alone: what the engine takes without pdq."""

    def __init__(self, pdq: Pdq, floor: FloorPath, herds: Herds, options: argparse.Namespace, alone: Answer) -> None:
        self._pdq = pdq
        self._herds = herds
        self._paths: dict[str, Branch] = {"floor": floor, "pdq": pdq}
        self._alone = {"floor": NOTHING, "pdq": alone}
        self._options = options

    async def at(self, workers: int) -> Size:
        print(f"{workers} workers", file=sys.stderr)
        await self._herds.set(workers)
        await many(self._pdq, WARM_UP, 4)
        await asyncio.sleep(SETTLE_S)
        rounds: dict[str, list[Round]] = {name: [] for name in PATHS}
        idle: list[Spent] = []
        for number in range(self._options.rounds):
            idle.append(await self._idle())
            for name in PATHS if number % 2 == 0 else PATHS[::-1]:
                rounds[name].append(await self._round(name, idle[-1]))
        floor, pdq = (scale_report.figures(rounds[name], self._alone[name]) for name in PATHS)
        seconds = len(idle) * self._options.seconds
        return Size(
            workers,
            {name: sum(each[name] for each in idle) / seconds for name in idle[0]},
            floor,
            pdq,
            await self._saturation("floor", floor.total_ms.median),
            await self._saturation("pdq", pdq.total_ms.median),
        )

    def _meter(self, name: str) -> Meter:
        pids = self._paths[name].pids
        roles: Mapping[str, Sequence[int]] = {role: [pid] for role, pid in pids.items()}
        if name == "pdq":
            roles = {**roles, **self._herds.pids}
        return Meter({**roles, "nats-server": [self._pdq.broker_pid], "client": [os.getpid()]})

    async def _idle(self) -> Spent:
        meter = self._meter("pdq")
        await asyncio.sleep(self._options.seconds)
        return {name: sum(each) for name, each in meter.usage().spent.items()}

    async def _round(self, name: str, idle: Spent) -> Round:
        """idle: what is spent in as much time without a load. The floor's own processes have nothing to do then."""
        meter = self._meter(name)
        offered = await offer(self._paths[name], self._options.rate, self._options.seconds)
        assert not offered.failed, offered.failed[0]
        await asyncio.sleep(BREATH_S)
        spent = {group: sum(each) for group, each in meter.usage().spent.items()}
        longer = (offered.took_s + BREATH_S) / self._options.seconds
        shared = idle if name == "pdq" else {group: idle[group] for group in ("nats-server", "client")}
        return Round(offered.answers, {group: each - shared.get(group, 0.0) * longer for group, each in spent.items()})

    async def _saturation(self, name: str, cpu_ms: float) -> Saturation:
        if not self._options.trial_seconds:
            return Saturation(0.0, "not tried", [])
        return await search(lambda rate: self._trial(name, rate), START * 1e3 * _cores() / cpu_ms)

    async def _trial(self, name: str, rate: float) -> Trial:
        meter, seconds = self._meter(name), self._options.trial_seconds
        offered = await offer(self._paths[name], rate, seconds)
        usage, alone_s = meter.usage(), self._alone[name].end_s
        added = percentile([answer.end_s for answer in offered.answers] or [BOUND_S * 2], 0.99) - alone_s
        found = Trial(
            rate,
            added <= BOUND_S and not offered.failed,
            len(offered.answers) / max(seconds, offered.took_s - alone_s),
            added * 1e3,
            len(offered.failed),
            usage.cores,
            limit(usage, _cores()),
        )
        print(f"  {name} at {rate:.0f}/s: {found.added_p99_ms:.0f} ms added (p99); {found.limit}", file=sys.stderr)
        await asyncio.sleep(BREATH_S)
        return found


def _cores() -> int:
    return os.cpu_count() or 1


async def run(options: argparse.Namespace, directory: Path) -> Report:
    """Start everything, measure, and end it in any case."""
    load = os.getloadavg()[0]
    async with Pdq(directory, options.trace_sample, ("router",), alike=False, profile=options.profile) as pdq:
        herds = Herds(pdq.stack)
        try:
            alone = Answer(*await engine.alone(directory, options.profile, ALONE_REPEATS))
            await herds.set(min(options.workers))
            shape = await learn(pdq)
            await make_floor_streams(pdq.bus, LimitSettings().of_streams())
            async with FloorPath(pdq.stack.broker.url, shape) as floor:
                await many(floor, WARM_UP, 1)
                scale = Scale(pdq, floor, herds, options, alone)
                sizes = [await scale.at(workers) for workers in options.workers]
        finally:
            await asyncio.to_thread(herds.stop)
    growth = scale_report.growth([size.pdq for size in sizes])
    return Report(
        load_before=load,
        load_after=os.getloadavg()[0],
        cores=_cores(),
        profile=options.profile,
        alone_first_ms=alone.first_s * 1e3,
        alone_end_ms=alone.end_s * 1e3,
        rate=options.rate,
        seconds=options.seconds,
        rounds=options.rounds,
        trace_sample=options.trace_sample,
        bound_ms=BOUND_S * 1e3,
        trial_s=options.trial_seconds,
        sizes=sizes,
        growth=growth,
        floor_growth=scale_report.growth([size.floor for size in sizes]),
        flat=growth <= scale_report.FLAT,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1_000], help="ascending (10 100 1000)")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second (%(default)g)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a round; a worker's idle pulls are renewed in 20 (%(default)g)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each path, at each number (%(default)s)")
    parser.add_argument(
        "--trial-seconds", type=float, default=5.0, help="of each rate tried; 0: none (%(default)g)", metavar="SECONDS"
    )
    parser.add_argument("--profile", default="llama3-8b-h100", help="how long the engine takes (%(default)s)")
    parser.add_argument("--trace-sample", type=float, default=1.0, help="share of traces recorded (%(default)g)")
    output.add_json(parser)
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
    output.put(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
