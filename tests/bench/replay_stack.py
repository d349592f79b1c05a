"""One order's stack: a broker, a router, herds of sim workers of its own, and a load on it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Self

from pdq.bench.drive import Drive, Options
from pdq.bench.over_nats import OverNats
from pdq.bench.prompts import Prompts
from pdq.bench.records import Record
from pdq.bench.workload import Load
from pdq.bus import Bus
from pdq.client import Client
from pdq.messages import StageName

from tests.bench.replay_setup import DECODE_SLOTS, MODELS, PREFILL_SLOTS, Setup
from tests.stack import MODEL, Stack

RUN = 1
"""The same prompts for all."""
READY_S = 120.0
TIMEOUT_S = 3_600.0
MOST_IN_FLIGHT = 100_000
FIELDS = {"temperature": 0.0, "ignore_eos": True}


class Side:
    """A context: all of it runs inside. `records`: of the requests that have ended."""

    def __init__(self, order: str, setup: Setup, directory: Path) -> None:
        self.order = order
        self.records: list[Record] = []
        self._setup = setup
        directory.mkdir()
        self._stack = Stack(directory)
        self._stack.settings = setup.environment(order)
        (directory / "models.toml").write_text(MODELS)
        self._router = self._stack.add("pdq_router")
        self._herds: dict[StageName, subprocess.Popen[str]] = {}
        self._bus: Bus

    async def __aenter__(self) -> Self:
        try:
            await self._stack.start()
            self._herds = {
                "prefill": self._herd("prefill", self._setup.prefill_workers, PREFILL_SLOTS),
                "decode": self._herd("decode", self._setup.decode_workers, DECODE_SLOTS),
            }
            async with asyncio.timeout(READY_S):
                for herd in self._herds.values():
                    await _ready(herd)
            self._bus = await self._stack.connect()
        except BaseException:
            await asyncio.to_thread(self._stop)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bus.close()
        await asyncio.to_thread(self._stop)

    async def run(self, load: Load, *, warm_up_s: float, until_s: float) -> None:
        """Until all has ended, or for `until_s`: what still runs then is recorded as interrupted."""
        target = OverNats(Client(self._bus, "local"), MODEL, "completions")
        prompts = Prompts("completions", MODEL, FIELDS, run=RUN)
        drive = Drive(target, prompts, Options(TIMEOUT_S, MOST_IN_FLIGHT, warm_up_s), self.records.append)
        try:
            async with asyncio.timeout(until_s):
                await drive.run(load)
        except TimeoutError:
            pass

    @property
    def pids(self) -> dict[str, int]:
        """Its processes by role."""
        broker, router = self._stack.broker.process, self._router.process
        assert broker is not None and router is not None
        return {"nats-server": broker.pid, "router": router.pid} | {name: p.pid for name, p in self._herds.items()}

    def decisions(self) -> dict[str, int]:
        """How many requests were routed, by order and reason."""
        found = {}
        for line in self._router.get("/metrics")[1].splitlines():
            if line.startswith("pdq_route_decisions_total{"):
                labels, value = line.rsplit(" ", 1)
                words = dict(part.split("=") for part in labels.partition("{")[2].rstrip("}").split(","))
                found[f"{words['order']} {words['reason']}".replace('"', "")] = int(float(value))
        return {name: number for name, number in found.items() if number}

    def _herd(self, stage: StageName, count: int, slots: int) -> subprocess.Popen[str]:
        more = {"PDQ_WORKER_SLOTS": str(slots), "PDQ_ENGINE_MAX_NUM_SEQS": str(slots)}
        with open(self._stack.directory / f"{stage}.log", "ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.bench.replay_herd", stage, str(count)],
                env=self._stack.environment(stage, **more),
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def _stop(self) -> None:
        for herd in self._herds.values():
            herd.terminate()
        for herd in self._herds.values():
            try:
                herd.wait(20)
            except subprocess.TimeoutExpired:
                herd.kill()
                herd.wait(10)
            assert herd.stdout is not None
            herd.stdout.close()
        self._stack.stop()


async def _ready(herd: subprocess.Popen[str]) -> None:
    assert herd.stdout is not None
    line = await asyncio.to_thread(herd.stdout.readline)
    assert line == "ready\n", f"a herd did not start: exit code {herd.poll()}"
