"""`python -m tests.bench.streams`: many SSE streams through one gateway, against a bare subscriber of the live subject.

Real services with the sim engine, decode alone: what is measured is the way from the log's live copy to the client.
The reader of the streams and the bare subscriber are processes of their own, and note when each event reached them:
a token's added latency is the difference of the two, of the same event. Tokens come in steps, as engines make them:
all running requests of a worker get theirs at one time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import psutil

from tests.bench import output
from tests.bench.cpu import cpu_s
from tests.bench.listen import Seen, Settings
from tests.bench.stats import percentile
from tests.stack import Stack

PROFILE = "llama3-8b-h100"
OPEN_S, CLOSE_S = 180.0, 30.0
SETTLE_S = 3.0
PROMPT = "A short story about a thousand people who listen to one another."
MOST_OF_MODEL = 4_000


class Report(msgspec.Struct, frozen=True, kw_only=True):
    load_before: float
    streams: int
    workers: int
    measured_s: float
    events: int
    """Of one token each: a step takes longer than the log waits for more."""
    kb_per_stream: float
    """Resident memory that the gateway gained from idle to all streams open, over their number; kB of 1,000 bytes."""
    tokens_per_cpu_s: float
    """Tokens that the gateway passed on per second of one core's time."""
    gateway_cpu_us_per_token: float
    bare_cpu_us_per_token: float
    added_p50_ms: float
    added_p99_ms: float
    missing: int
    """Events that the bare subscriber saw within the measured time and no stream did: 0, or something is wrong."""
    failed: tuple[str, ...]

    def lines(self) -> list[str]:
        return [
            f"{self.streams} streams for {self.measured_s:.0f} s, {self.workers} workers; load {self.load_before:.1f}",
            f"  memory per stream           {self.kb_per_stream:8.1f} kB",
            f"  tokens a second             {self.events / self.measured_s:8.0f}",
            f"  tokens per second of a core {self.tokens_per_cpu_s:8.0f}",
            f"  CPU per token, gateway      {self.gateway_cpu_us_per_token:8.0f} µs",
            f"  CPU per token, bare reader  {self.bare_cpu_us_per_token:8.0f} µs",
            f"  added latency p50, p99      {self.added_p50_ms:8.2f} {self.added_p99_ms:8.2f} ms",
            f"  missing, failed             {self.missing:8d} {len(self.failed):8d}",
        ]


class Listener:
    """A process of tests.bench.listen."""

    def __init__(self, role: str, settings: Settings) -> None:
        command = [sys.executable, "-m", "tests.bench.listen", role, msgspec.json.encode(settings).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def __aenter__(self) -> Self:
        assert self._process.stdout is not None
        async with asyncio.timeout(OPEN_S):
            line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == b"ready\n", f"a reader did not start: exit code {self._process.poll()}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        await asyncio.to_thread(self._process.communicate)

    async def seen(self) -> Seen:
        """End it; what it saw."""
        out, _ = await asyncio.to_thread(self._process.communicate, timeout=CLOSE_S)
        return msgspec.json.decode(out, type=Seen)


async def run(options: argparse.Namespace, directory: Path) -> Report:
    """Start everything, open the streams, measure, and end it in any case."""
    load = os.getloadavg()[0]
    slots = -(-options.streams // options.workers)
    stack = Stack(
        directory,
        PDQ_ROUTER_ORDER="decode-only",
        PDQ_WORKER_SLOTS=str(slots),
        PDQ_ENGINE_MAX_NUM_SEQS=str(slots),
        PDQ_ENGINE_MAX_NUM_BATCHED_TOKENS="8192",
        PDQ_ENGINE_SIM_PROFILE=f"{PROFILE}*{options.slower:g}",
        PDQ_ROUTER_QUEUE_LIMIT=str(2 * options.streams),
        PDQ_TRACE_SAMPLE="0",
    )
    stack.add("pdq_router")
    gateway = stack.add("pdq_gateway")
    for _ in range(options.workers):
        stack.add("pdq_decode")
    try:
        await stack.start()
        assert gateway.process is not None
        process = psutil.Process(gateway.process.pid)
        port = int(gateway.environment["PDQ_GATEWAY_PORT"])
        await _warm(port)
        return await _measure(options, stack, process, port, load)
    finally:
        await asyncio.to_thread(stack.stop)


async def _warm(port: int) -> None:
    """One stream to its end, so that what every first request loads is not counted."""
    async with Listener("sse", Settings(port=port, streams=1, body=_body(8))) as reader:
        await asyncio.sleep(SETTLE_S)
        seen = await reader.seen()
    assert seen.ended == 1, f"one stream alone did not end well: {seen.failed}"


async def _measure(
    options: argparse.Namespace, stack: Stack, gateway: psutil.Process, port: int, load: float
) -> Report:
    idle = gateway.memory_info().rss
    settings = Settings(port=port, streams=options.streams, body=_body(MOST_OF_MODEL))
    async with (
        Listener("bare", Settings(nats_url=stack.broker.url)) as bare,
        Listener("sse", settings) as reader,
    ):
        await asyncio.sleep(SETTLE_S)
        cpu, began = cpu_s(gateway.pid), time.monotonic()
        await asyncio.sleep(options.seconds)
        cpu, ended = cpu_s(gateway.pid) - cpu, time.monotonic()
        full = gateway.memory_info().rss
        # The bare one first: whatever it saw, the streams had time to bring.
        alone, streamed = await bare.seen(), await reader.seen()
    within = [seq for seq, at in alone.events.items() if began <= at < ended]
    added = [streamed.events[seq] - alone.events[seq] for seq in within if seq in streamed.events]
    return Report(
        load_before=load,
        streams=options.streams,
        workers=options.workers,
        measured_s=ended - began,
        events=len(within),
        kb_per_stream=(full - idle) / 1e3 / options.streams,
        tokens_per_cpu_s=len(within) / cpu,
        gateway_cpu_us_per_token=cpu * 1e6 / len(within),
        bare_cpu_us_per_token=alone.cpu_s * 1e6 / max(1, len(alone.events)),
        added_p50_ms=percentile(added, 0.5) * 1e3,
        added_p99_ms=percentile(added, 0.99) * 1e3,
        missing=len(within) - len(added),
        failed=streamed.failed,
    )


def _body(max_tokens: int) -> str:
    fields = {"model": "sim", "prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    return json.dumps({**fields, "temperature": 0})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=1_000, help="at one time (%(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="decode workers (%(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured, once all streams run (%(default)g)")
    parser.add_argument("--slower", type=float, default=60.0, help="factor on the engine's times (%(default)g)")
    output.add_json(parser)
    options = parser.parse_args(arguments)
    if min(options.streams, options.workers, options.seconds, options.slower) <= 0:
        parser.error("--streams, --workers, --seconds and --slower must be above 0")
    logging.getLogger("pdq").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pdq-streams-") as directory:
        report = asyncio.run(run(options, Path(directory)))
    output.put(report, as_json=options.json)
    return 1 if report.missing or report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
