"""`python -m tests.bench.cold_start`: from nothing to a worker that has served the request that waited for it.

A request waits with no worker alive; then `pdq worker` is started, with the real engine. `--tier cold`: its LMCache
server is started with it, as on a machine that has just come up; `warm`: it runs already. The parts are the worker's
own (`pdq_worker_start_seconds`), and may overlap; `served` goes from the process's beginning to the first token, or to
prefill's handoff; `cpu_…` is what its processes had used by then; `stop` goes from SIGTERM to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
from pdq.client import Client, new_request_id
from pdq.settings import ModelSpec

from tests.bench import output
from tests.bench.stats import spread
from tests.e2e.conftest import KvServer, default_model, real_stack
from tests.stack import Stack, chat
from tests.worker import Worker

ROLES = ("prefill", "decode", "both")
READY_S = 300.0
QUESTION = "What is the capital of France? Say which river runs through it, and name one famous building there."


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """role and tier as they were asked for. starts: of each, seconds by part."""

    role: str
    tier: str
    cores: int
    load_after: float
    starts: list[dict[str, float]]

    def lines(self) -> list[str]:
        """The summary as text."""
        title = f"{self.role}, LMCache server {self.tier}; {len(self.starts)} starts on {self.cores} cores"
        lines = [
            f"{title}, load average {self.load_after:.2f} after",
            f"  {'part':<16}{'min s':>8}{'median s':>10}{'max s':>8}",
        ]
        for part in self.starts[0]:
            found = spread([start[part] for start in self.starts])
            lines.append(f"  {part:<16}{found.min:>8.2f}{found.median:>10.2f}{found.max:>8.2f}")
        return lines


def main() -> int:
    options = _options()
    spec = default_model()
    starts = [asyncio.run(_once(spec, options.role, cold=options.tier == "cold")) for _ in range(options.repeats)]
    report = Report(
        role=options.role,
        tier=options.tier,
        cores=os.cpu_count() or 1,
        load_after=os.getloadavg()[0],
        starts=starts,
    )
    output.put(report, as_json=options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.cold_start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--role", choices=ROLES, default="prefill")
    parser.add_argument("--tier", choices=("cold", "warm"), default="cold", help="of the LMCache server (cold)")
    parser.add_argument("--repeats", type=int, default=3, help="(3)")
    output.add_json(parser)
    return parser.parse_args()


async def _once(spec: ModelSpec, role: str, *, cold: bool) -> dict[str, float]:
    """One start: seconds by part."""
    with tempfile.TemporaryDirectory() as place:
        server = KvServer(Path(place) / "lmcache", spec)
        stack = real_stack(Path(place), spec, server)
        stack.add("pdq_router")
        try:
            if not cold:
                await server.start()
            await stack.start()
            return await _served(stack, spec, server, role, cold=cold)
        finally:
            stack.stop()
            server.stop()


async def _served(stack: Stack, spec: ModelSpec, server: KvServer, role: str, *, cold: bool) -> dict[str, float]:
    bus = await stack.connect()
    client, request = Client(bus, "local"), new_request_id()
    worker = Worker(stack, role)
    worker.ready_s = READY_S
    order = "prefill-first" if role == "prefill" else "decode-only"
    async with client.follow(request, catch_up=False) as follower:
        await client.submit(chat(QUESTION, max_tokens=4), model=spec.slug, request=request, order=order)
        began = time.monotonic()
        worker.start()
        starting = asyncio.create_task(server.start()) if cold else None
        async for event in follower.events(READY_S):
            if event.out is not None or (event.state is not None and event.state.event == "prefilled"):
                break
        served_s = time.monotonic() - began
        if starting is not None:
            await starting
    await bus.close()
    parts = await asyncio.to_thread(worker.start_s)
    cpu_s = _cpu_s(worker)
    ending = time.monotonic()
    if await asyncio.to_thread(worker.stop, 60):
        raise SystemExit(f"the worker did not end in order:\n{worker.log.read_text()[-2_000:]}")
    return {**parts, "served": served_s, **cpu_s, "stop": time.monotonic() - ending}


def _cpu_s(worker: Worker) -> dict[str, float]:
    """CPU seconds of the worker and of its engine's core, so far: on a busy machine they say more than the clock."""
    assert worker.process is not None
    front = psutil.Process(worker.process.pid)
    return {"cpu_front": _spent_s(front), "cpu_core": sum(map(_spent_s, front.children(recursive=True)))}


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
