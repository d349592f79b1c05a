"""The rounds: each set-up is started, asked all its loads, and ended, before the next one starts."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec

from pdq import settings
from pdq.bench import over_http
from pdq.bench.compare import kv, loads, setups, topologies
from pdq.bench.compare.kv import KvCount
from pdq.bench.compare.loads import Sizes
from pdq.bench.compare.rows import Run
from pdq.bench.compare.setups import Setup
from pdq.bench.compare.shown import Shown
from pdq.bench.compare.targets import PrefillThenDecode, RoundRobin
from pdq.bench.compare.topologies import Common, Running
from pdq.bench.drive import Drive, Options
from pdq.bench.over_http import OverHttp
from pdq.bench.prompts import Prompts
from pdq.bench.records import Record
from pdq.bench.target import Target
from pdq.bench.workload import Load
from pdq.bus import Bus
from pdq.client import ORDER_HEADER, Client
from pdq.errors import PdqError
from pdq.settings import BusSettings
from pdq.up.layout import Layout

MOST_IN_FLIGHT = 10_000
CONNECT_TIMEOUT_S = 5.0
TOLD_LINES = 12


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole comparison. `seed`: of times and lengths, with the round's number."""

    setups: tuple[Setup, ...]
    rounds: int
    sizes: Sizes
    seed: int
    timeout_s: float
    """Of a request."""

    def load(self, name: loads.Name, number: int) -> Load:
        return loads.plan(name, self.sizes, self.seed + number)

    @property
    def num_requests(self) -> int:
        return sum(
            len(self.load(load, number)) for number in range(self.rounds) for each in self.setups for load in each.loads
        )


class Comparison:
    """Runs a plan. `found` has what was measured so far, also where it was stopped."""

    def __init__(self, plan: Plan, common: Common, directory: Path, shown: Shown) -> None:
        self.found: list[Run] = []
        self._plan = plan
        self._common = common
        self._directory = directory
        self._shown = shown

    async def run(self) -> None:
        for number in range(self._plan.rounds):
            for together in setups.starts(self._plan.setups, number):
                await self._start(together, number)

    async def _start(self, together: Sequence[Setup], number: int) -> None:
        """Set-ups on the same processes. One that does not start is told of; the others go on."""
        names = "+".join(setup.name for setup in together)
        layout = Layout(self._directory / f"{number + 1}-{names}")
        label, began = f"round {number + 1}: {names}", time.monotonic()

        def waiting(names: str) -> None:
            if names:
                self._shown.doing(f"{label}: starting {names}")

        self._shown.doing(f"{label}: starting")
        done: list[Run] = []
        try:
            async with topologies.running(together[0], self._common, layout, waiting) as up:
                self._shown.say(f"{label}: ready after {time.monotonic() - began:.0f} s")
                for setup in together:
                    await self._measure(setup, up, number, done)
        except PdqError as exc:
            self._failed(together, number, done, exc)
        finally:
            self.found += done
            shutil.rmtree(layout.kv_pool, ignore_errors=True)

    def _failed(self, together: Sequence[Setup], number: int, done: list[Run], exc: PdqError) -> None:
        self._shown.say(f"{exc.code}: {exc}")
        had = {(run.setup, run.load) for run in done}
        for setup in together:
            for load in setup.loads:
                if (setup.name, load) not in had:
                    done.append(Run(setup=setup.name, load=load, round=number + 1, error=_last_line(exc)))
                    self._shown.skipped(len(self._plan.load(load, number)))

    async def _measure(self, setup: Setup, up: Running, number: int, done: list[Run]) -> None:
        async with _asked(setup, up, self._common) as asked:
            self._shown.doing(f"round {number + 1}: {setup.name}: warming up")
            await self._drive(asked.target, loads.warm_up(), [], quiet=True)
            for name in setups.order(setup.loads, number):
                self._shown.doing(f"round {number + 1}: {setup.name}: {name}")
                records: list[Record] = []
                try:
                    before = await asked.kv_before()
                    await self._drive(asked.target, self._plan.load(name, number), records)
                    count = await asked.kv_of(records, before)
                except BaseException:
                    done.append(_run(setup, name, number, records, None))
                    raise
                done.append(_run(setup, name, number, records, count))

    async def _drive(self, target: Target, load: Load, records: list[Record], *, quiet: bool = False) -> None:
        def take(record: Record) -> None:
            records.append(record)
            if not quiet:
                self._shown.ended(record)

        warm_up_s = 0.0 if quiet else self._plan.sizes.warm_up_s
        options = Options(self._plan.timeout_s, MOST_IN_FLIGHT, warm_up_s)
        await Drive(target, Prompts(target.api, target.model, loads.FIELDS), options, take).run(load)


def _run(setup: Setup, load: loads.Name, number: int, records: Sequence[Record], count: KvCount | None) -> Run:
    return Run(setup=setup.name, load=load, round=number + 1, records=tuple(records), kv=count)


def _last_line(exc: PdqError) -> str:
    """An error with the end of a log below it: what happened, and the log's last word."""
    first, *story = str(exc).splitlines()
    return " | ".join([first, *story[-1:]])


class _Asked:
    """A set-up as a load sees it, and what it says of its KV."""

    def __init__(self, setup: Setup, up: Running, target: Target, http: aiohttp.ClientSession, common: Common) -> None:
        self.target = target
        self._setup = setup
        self._up = up
        self._http = http
        self._common = common

    async def kv_before(self) -> int:
        return await kv.vllm_hits(self._http, self._up.urls[-1]) if self._setup.topology == "connector" else 0

    async def kv_of(self, records: Sequence[Record], before: int) -> KvCount | None:
        """None where nothing is promised. Raises Unavailable."""
        if not self._setup.disaggregated:
            return None
        if self._setup.topology == "connector":
            promised = kv.promised_by_files(records, self._common.model.block_tokens)
            return KvCount(promised_tokens=promised, loaded_tokens=await self.kv_before() - before)
        bus = await Bus.connect(BusSettings(url=self._up.nats_url, connect_timeout_s=CONNECT_TIMEOUT_S), "pdq-compare")
        try:
            return await kv.of_pdq(Client(bus, settings.tenant(self._common.environ)), records)
        finally:
            await bus.close()


@contextlib.asynccontextmanager
async def _asked(setup: Setup, up: Running, common: Common) -> AsyncIterator[_Asked]:
    headers = {"Content-Type": "application/json"} | ({ORDER_HEADER: setup.order} if setup.order else {})
    async with over_http.session(headers) as http:
        targets = [OverHttp(http, url, common.model.id, "completions") for url in up.urls]
        target: Target = targets[-1]
        if setup.topology == "replicas":
            target = RoundRobin(targets)
        elif setup.topology == "connector":
            target = PrefillThenDecode(http, up.urls[0], targets[-1])
        yield _Asked(setup, up, target, http, common)
