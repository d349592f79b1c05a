"""What runs for a set-up: started, and ended again in any case, in a directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pdq import settings
from pdq.bench.compare.hardware import Hardware, Place
from pdq.bench.compare.plain import Servers, budget
from pdq.bench.compare.setups import Setup
from pdq.errors import PdqError
from pdq.settings import EngineSettings, ModelSpec, WorkerSettings, variable
from pdq.up import caches
from pdq.up import model as models
from pdq.up import record as records
from pdq.up.caches import KvMode
from pdq.up.layout import Layout
from pdq.up.machine import HOST
from pdq.up.model import EngineKind
from pdq.up.plan import Options, Plan
from pdq.up.process import GUARD_PATIENCE_S, Guard, Spec
from pdq.up.record import Record
from pdq.up.supervisor import Recorder, Supervisor, unready

KV: dict[str, KvMode] = {"decoders": "host", "pool": "pool", "p2p": "p2p"}
GPU_SHARE = "0.85"
"""An engine has its GPUs for itself."""
STEP = variable(EngineSettings, "max_num_batched_tokens")
REQUESTS = variable(EngineSettings, "max_num_seqs")
DECODE_SPARE = 2
"""Tokens of a step of decode, besides one for each request that it can have, where engines disaggregate on CPUs and it
is not said otherwise; a GPU has its own defaults. What is left of a prompt beside its whole chunks is computed there,
and must not hold up all others."""
PREFILL_YIELDS, TIERS_YIELD = 10, 5
"""What runs beside the prefill engine on its cores takes little, and others wait for it, decode too: it goes first, and
of it what passes tokens on."""


class Running(NamedTuple):
    """What can be asked: OpenAI endpoints with their /v1, and pdq's broker where there is one."""

    urls: tuple[str, ...]
    nats_url: str = ""


class Common(NamedTuple):
    """What is the same for all set-ups."""

    model: ModelSpec
    engine: EngineKind
    hardware: Hardware
    environ: Mapping[str, str]
    start_timeout_s: float


Show = Callable[[str], None]


@contextlib.asynccontextmanager
async def running(setup: Setup, options: Common, layout: Layout, show: Show) -> AsyncIterator[Running]:
    """The processes of a set-up for the length of a `with`. `show`: told what is not ready yet.

    Raises StackFailed, Misconfigured or Unavailable, and StackFailed for a PdqError in the `with` where a process has
    ended meanwhile; nothing is left running then either.
    """
    layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with records.claim(layout, wait_s=3 * GUARD_PATIENCE_S) as lock:
        layout.prepare()
        models.write(options.model, layout.models)
        record = Record(pid=os.getpid(), started=0.0, engine=options.engine, directory=str(layout.root))
        recorder = Recorder(layout, record, lambda seen: show(_waited_for(seen)))
        guard = Guard(lock)
        supervisor = Supervisor(layout, recorder, guard)
        try:
            up = await _started(setup, options, layout, supervisor, recorder)
            with _better_told(supervisor):
                yield up
        finally:
            await _stop(supervisor, guard)


@contextlib.contextmanager
def _better_told(supervisor: Supervisor) -> Iterator[None]:
    """Who cannot be reached may be no more: then why it ended is the better story."""
    try:
        yield
    except PdqError:
        supervisor.check("while it was asked")
        raise


def _waited_for(record: Record) -> str:
    return ", ".join(process.name for process in record.processes if process.state in ("waiting", "starting"))


async def _started(
    setup: Setup, options: Common, layout: Layout, supervisor: Supervisor, recorder: Recorder
) -> Running:
    pdq = setup.topology in KV
    start = _Pdq(setup, options, layout, supervisor).start if pdq else _Plain(setup, options, layout, supervisor).start
    try:
        async with asyncio.timeout(options.start_timeout_s):
            return await start()
    except TimeoutError:
        raise unready(recorder.record, options.start_timeout_s) from None


async def _stop(supervisor: Supervisor, guard: Guard) -> None:
    """Cancelled meanwhile, everything is ended at once."""
    try:
        await supervisor.stop()
    except asyncio.CancelledError:
        supervisor.kill()
        raise
    finally:
        await asyncio.to_thread(guard.close)


class _Plain:
    """vLLM's own servers."""

    def __init__(self, setup: Setup, options: Common, layout: Layout, supervisor: Supervisor) -> None:
        self._setup = setup
        self._hardware = options.hardware
        self._layout = layout
        self._supervisor = supervisor
        self._servers = Servers(options.model, options.environ, options.start_timeout_s)

    async def start(self) -> Running:
        specs = self._specs()
        self._supervisor.expect(*(spec.name for spec in specs))
        await self._supervisor.start(specs)
        return Running(tuple(f"http://{HOST}:{spec.ports['api']}/v1" for spec in specs))

    def _specs(self) -> list[Spec]:
        first, second, both = self._hardware.first, self._hardware.second, self._hardware.both
        match self._setup.topology:
            case "plain":
                return [self._servers.one("vllm", both, *budget(self._setup.budget))]
            case "half":
                return [self._servers.one("vllm", second)]
            case "replicas":
                return [self._servers.one("vllm-1", first), self._servers.one("vllm-2", second)]
            case _:
                return self._pair(first, second)

    def _pair(self, first: Place, second: Place) -> list[Spec]:
        directory = self._layout.root / "files"
        directory.mkdir(exist_ok=True)
        return [
            self._servers.handing_over("vllm-prefill", first, "kv_producer", directory),
            self._servers.handing_over("vllm-decode", second, "kv_consumer", directory),
        ]


class _Pdq:
    """A stack as `pdq up` has it, its workers placed."""

    def __init__(self, setup: Setup, options: Common, layout: Layout, supervisor: Supervisor) -> None:
        self._setup = setup
        self._options = options
        self._supervisor = supervisor
        self._kv = KV[setup.topology]
        self._vllm = options.engine == "vllm"
        self._plan = Plan(Options(layout, options.environ, options.engine, kv=self._kv), options.model)
        self._layout = layout

    async def start(self) -> Running:
        names = caches.names(self._kv) if self._vllm else ()
        self._supervisor.expect("nats", *names, "router", "gateway", *self._worker_names())
        await self._supervisor.start(self._beside(self._plan.brokers()))
        await self._plan.init()
        tiers, gateway = self._tiers(), self._plan.gateway()
        # Engines wait for their tiers by themselves.
        await self._supervisor.start(*tiers, self._beside([self._plan.router(), gateway]), self._workers())
        return Running((f"http://{HOST}:{gateway.ports['api']}/v1",), self._plan.nats_url)

    def _tiers(self) -> list[list[Spec]]:
        if self._vllm:
            return [self._beside(self._yielding(level, TIERS_YIELD)) for level in self._plan.caches()]
        self._layout.sim_kv.mkdir(exist_ok=True)
        return []

    def _worker_names(self) -> tuple[str, str]:
        return ("decode-1", "decode-2") if self._setup.topology == "decoders" else ("prefill", "decode")

    def _workers(self) -> list[Spec]:
        places = (self._options.hardware.first, self._options.hardware.second)
        found = zip(self._plan.workers(), self._worker_names(), places, strict=True)
        placed = [_placed(spec, name, place) for spec, name, place in found]
        if self._shares_cpus:
            prefill, decode = placed
            placed = [*self._yielding([prefill], PREFILL_YIELDS), _tuned(decode, decode_settings(decode.environment))]
        return self._beside(placed)

    @property
    def _shares_cpus(self) -> bool:
        """Whether all that is no decode engine runs on the same CPUs."""
        return self._setup.disaggregated and bool(self._options.hardware.first.cpus)

    def _yielding(self, specs: Sequence[Spec], to_others: int) -> list[Spec]:
        if not self._shares_cpus:
            return list(specs)
        return [spec._replace(command=("nice", "-n", str(to_others), *spec.command)) for spec in specs]

    def _beside(self, specs: Sequence[Spec]) -> list[Spec]:
        """All that is no engine stays with the prefill engine, where there is one: what decodes has its CPUs for
        itself. An engine's own process binds itself to its place."""
        place = self._options.hardware.first if self._setup.disaggregated and self._vllm else Place()
        return [spec._replace(command=place.pinned(tuple(spec.command))) for spec in specs]


def _placed(spec: Spec, name: str, place: Place) -> Spec:
    """A worker of `pdq up` under another name, which may be of another stage; on GPUs of its own where it has some."""
    stage = name.partition("-")[0]
    gpu = {"PDQ_ENGINE_GPU_MEMORY_UTILIZATION": GPU_SHARE} if place.devices else {}
    environ = dict(spec.environment) | place.environment | gpu
    return spec._replace(name=name, command=_of_stage(spec.command, stage), environment=environ)


def _tuned(spec: Spec, more: Mapping[str, str]) -> Spec:
    """With more settings, where it has none of those names."""
    return spec._replace(environment=dict(more) | dict(spec.environment))


def decode_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Of an engine for as many requests as its worker takes, with hardly more tokens in a step."""
    slots = settings.load(WorkerSettings, environ).slots
    requests = settings.load(EngineSettings, {REQUESTS: str(slots)} | dict(environ)).max_num_seqs
    return {REQUESTS: str(requests), STEP: str(requests + DECODE_SPARE)}


def _of_stage(command: Sequence[str], stage: str) -> tuple[str, ...]:
    return tuple(f"pdq_{stage}" if part in ("pdq_prefill", "pdq_decode") else part for part in command)
