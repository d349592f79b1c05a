"""`python -m tests.bench.tokens`: tokens a second from one decode process to one reader through the log, and the floor.

The writer is a process (tests/bench/write.py) that has several requests and makes a token of each in a step, as fast as
it can; batches are as the log's writer makes them. The reader, this process, follows all of them with pdq's client and
checks every answer's digest. The floor sends messages of the same size and number over nats-py, to a bare subscriber.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import nats
import uvloop
from nats.aio.msg import Msg
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.log import Transcript
from pdq.log.output import BATCH_TOKENS
from pdq.settings import LimitSettings

from tests.bench import output
from tests.bench.cpu import cpu_s
from tests.bench.paths import make_floor_streams
from tests.bench.stats import Spread, ratios, spread
from tests.bench.write import TENANT, Round
from tests.stack import Stack

START_S, ROUND_S = 20.0, 120.0
PATHS: tuple[Literal["floor", "pdq"], ...] = ("floor", "pdq")


class Result(msgspec.Struct, frozen=True):
    """Of one round of one path. cpu_us: per token, by process."""

    tokens_per_s: float
    batch: float
    cpu_us: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    load_before: float
    requests: int
    tokens: int
    """Of each request."""
    rounds: dict[str, list[Result]]

    @property
    def ratio(self) -> Spread | None:
        floor, pdq = ([each.tokens_per_s for each in self.rounds[name]] for name in PATHS)
        return ratios(pdq, floor)

    def lines(self) -> list[str]:
        """The summary as text."""
        title = f"{self.requests} requests of {self.tokens} tokens at one time, {len(self.rounds['pdq'])} rounds"
        lines = [f"load average {self.load_before:.1f} before; {title}"]
        for name, results in self.rounds.items():
            rate = spread([each.tokens_per_s for each in results])
            cpu = {who: spread([each.cpu_us[who] for each in results]).median for who in results[0].cpu_us}
            lines.append(
                f"  {name:<6}{rate.median:>9.0f} tokens/s ({rate.min:.0f} … {rate.max:.0f}), "
                f"{results[0].batch:.1f} tokens a message; CPU a token: {output.listed(cpu, 'µs', 1)}"
            )
        if self.ratio is not None:
            lines.append(f"  pdq over floor {self.ratio.median:.2f} ({self.ratio.min:.2f} … {self.ratio.max:.2f})")
        return lines


class Bench:
    """One writer, one reader, both paths in turns."""

    def __init__(self, stack: Stack, bus: Bus, nc: nats.NATS, writer: subprocess.Popen[bytes]) -> None:
        assert stack.broker.process is not None
        self._client = Client(bus, TENANT)
        self._nc = nc
        self._writer = writer
        self._pids = {"writer": writer.pid, "nats-server": stack.broker.process.pid, "reader": os.getpid()}

    async def round(self, path: Literal["floor", "pdq"], requests: int, tokens: int) -> Result:
        job = Round(path, [new_request_id() for _ in range(requests)], tokens)
        before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        async with asyncio.timeout(ROUND_S):
            took_s, messages = await (self._read(job) if path == "pdq" else self._count(job))
            await self._line(b"done\n")
        total = requests * tokens
        cpu = {name: (cpu_s(pid) - before[name]) * 1e6 / total for name, pid in self._pids.items()}
        return Result(total / took_s, total / messages, cpu)

    async def _read(self, job: Round) -> tuple[float, int]:
        """Follow all requests to their ends. Returns seconds since the writer was told, and messages."""
        following, messages = asyncio.Semaphore(0), 0

        async def follow(request: str) -> None:
            nonlocal messages
            shown = Transcript()
            async with self._client.follow(request, catch_up=False) as follower:
                following.release()
                async for event in follower.events(ROUND_S):
                    shown.feed(event)
                    messages += event.out is not None
            assert shown.complete() and len(shown.ids) == job.tokens, f"request {request} is not whole"

        async with asyncio.TaskGroup() as group:
            for request in job.requests:
                group.create_task(follow(request))
            for _ in job.requests:
                await following.acquire()
            began = self._begin(job)
        return time.perf_counter() - began, messages

    async def _count(self, job: Round) -> tuple[float, int]:
        """See all messages. Returns as `_read`."""
        expected, seen = len(job.requests) * job.tokens // BATCH_TOKENS, 0
        over = asyncio.Event()

        async def take(message: Msg) -> None:
            nonlocal seen
            seen += 1
            if seen == expected:
                over.set()

        subscription = await self._nc.subscribe(f"floor.live.{TENANT}.*.*", cb=take)
        await asyncio.sleep(0)
        await self._nc.flush()
        began = self._begin(job)
        await over.wait()
        took_s = time.perf_counter() - began
        await subscription.unsubscribe()
        return took_s, seen

    def _begin(self, job: Round) -> float:
        assert self._writer.stdin is not None
        self._writer.stdin.write(msgspec.json.encode(job) + b"\n")
        self._writer.stdin.flush()
        return time.perf_counter()

    async def _line(self, wanted: bytes) -> None:
        assert self._writer.stdout is not None
        line = await asyncio.to_thread(self._writer.stdout.readline)
        assert line == wanted, f"the writer said {line!r}: exit code {self._writer.poll()}"

    async def ready(self) -> None:
        async with asyncio.timeout(START_S):
            await self._line(b"ready\n")


async def run(options: argparse.Namespace, directory: Path) -> Report:
    """Start everything, measure, and end it in any case."""
    load, stack = os.getloadavg()[0], Stack(directory)
    try:
        await stack.start()
        bus, nc = await stack.connect(), await nats.connect(stack.url)
        await make_floor_streams(bus, LimitSettings().of_streams())
        command = [sys.executable, "-m", "tests.bench.write", stack.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            try:
                bench = Bench(stack, bus, nc, writer)
                await bench.ready()
                rounds: dict[str, list[Result]] = {name: [] for name in PATHS}
                for name in PATHS:
                    await bench.round(name, options.requests, min(options.tokens, 10 * BATCH_TOKENS))
                for number in range(options.rounds):
                    for name in PATHS if number % 2 == 0 else PATHS[::-1]:
                        rounds[name].append(await bench.round(name, options.requests, options.tokens))
            finally:
                writer.terminate()
        await nc.close()
        await bus.close()
    finally:
        await asyncio.to_thread(stack.stop)
    return Report(load, options.requests, options.tokens, rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tokens", description=__doc__)
    parser.add_argument("--requests", type=int, default=16, help="at one time (%(default)s)")
    parser.add_argument("--tokens", type=int, default=4_000, help=f"of each, in {BATCH_TOKENS}s (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each path (%(default)s)")
    output.add_json(parser)
    options = parser.parse_args(arguments)
    if min(options.requests, options.tokens, options.rounds) < 1 or options.tokens % BATCH_TOKENS:
        parser.error(f"--requests and --rounds must be at least 1, --tokens a multiple of {BATCH_TOKENS}")
    with (
        tempfile.TemporaryDirectory(prefix="pdq-tokens-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        report = runner.run(run(options, Path(directory)))
    output.put(report, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
