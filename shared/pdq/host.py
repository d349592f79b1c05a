"""The process of a worker: an engine, a broker connection, and the loops of its stages.

A worker is ready only once its engine has produced a token and its KV tier has stored and loaded a chunk
(`Engine.start` proves both). It stops in order: no new jobs, let finish what fits in the drain time, give
back the rest, close the engine, flush the spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from pdq import settings as config
from pdq import subjects
from pdq.about import about
from pdq.bus import Bus, Outbox, Puller, connected
from pdq.engines.base import Engine
from pdq.engines.early import EarlyProcess
from pdq.engines.factory import create
from pdq.engines.vllm_config import Role
from pdq.errors import Unavailable
from pdq.kv.contract import read_key, salt
from pdq.messages import LANES, DecodeJob, DrainReply, StageName, encode_json, unpack_ids
from pdq.service import Check, HealthServer, Stop, log_settings
from pdq.stage import Handler, Loop, StageWorker
from pdq.stage.beats import Beats, Stage
from pdq.stage.costs import CostMeter
from pdq.stage.delegation import Delegation
from pdq.stage.fleet import Fleet
from pdq.stage.idle import Idle
from pdq.stage.preference import Preference
from pdq.stage.room import Room
from pdq.stage.staging import Staging
from pdq.stage.watch import Watch
from pdq.telemetry import Metrics, Start, Telemetry

log = logging.getLogger("pdq.host")

MakeHandler = Callable[[Engine, bytes], Handler[Any]]
"""A handler over a started engine; the bytes key the hash of tenants in KV salts."""

STATS_S = 5.0
STAGED_SHARE = 4
"""Of the KV that may wait for decode, one worker stages this part at most."""


class Settings(msgspec.Struct, frozen=True):
    """All groups a worker reads."""

    bus: config.BusSettings
    limits: config.LimitSettings
    trace: config.TelemetrySettings
    http: config.HttpSettings
    worker: config.WorkerSettings
    engine: config.EngineSettings
    kv: config.KvSettings

    @classmethod
    def load(cls) -> Settings:
        """From the environment. Raises Misconfigured."""
        return cls(
            config.load(config.BusSettings),
            config.load(config.LimitSettings),
            config.load(config.TelemetrySettings),
            config.load(config.HttpSettings),
            config.load(config.WorkerSettings),
            config.load(config.EngineSettings),
            config.load(config.KvSettings),
        )


async def serve(
    role: Role, stages: Mapping[StageName, MakeHandler], stop: Stop, core: EarlyProcess | None = None
) -> None:
    """Run a worker of these stages until `stop` is set. Raises Misconfigured or Unavailable.

    `core`: a process for the engine's core that exists already.
    """
    start = Start()
    settings = Settings.load()
    log_settings(*(getattr(settings, name) for name in settings.__struct_fields__))
    spec = config.load_models(config.models_path()).one(settings.worker.model)
    worker = config.worker_id(settings.worker, role)
    metrics = Metrics([spec.slug])
    engine = create(spec, role, settings.engine, settings.kv, core)
    host = _Host(settings, worker, engine, metrics, start, stop)
    consumers = [pair for stage in stages for pair in _consumers(stage, spec.slug)]
    telemetry = Telemetry.start(role if role != "both" else "worker", settings.trace, worker)
    try:
        async with (
            HealthServer(settings.http, metrics, host.checks(), stop),
            host.connected(f"pdq-{role}-{worker}", consumers),
            host.engine_running(),
            host.parts(telemetry) as parts,
        ):
            # A stop while the engine starts is no failure.
            if not stop.is_set():
                metrics.worker(role, spec.slug, engine.info.name)
                key = read_key(settings.kv.key_file)
                await host.work({stage: make(engine, key) for stage, make in stages.items()}, parts)
    finally:
        await asyncio.to_thread(telemetry.close)


def _consumers(stage: StageName, model: str) -> list[tuple[str, str]]:
    """(stream, consumer) of each lane, most urgent first."""
    return [(subjects.STAGE_STREAM[stage], subjects.consumer(model, lane)) for lane in LANES]


class _Parts(msgspec.Struct, frozen=True):
    """What the stages of one worker share."""

    outbox: Outbox
    watch: Watch
    telemetry: Telemetry


class _Host:
    def __init__(
        self, settings: Settings, worker: str, engine: Engine, metrics: Metrics, start: Start, stop: Stop
    ) -> None:
        self.bus: Bus | None = None
        self._settings = settings
        self._worker = worker
        self._engine = engine
        self._metrics = metrics
        self._start = start
        self._stop = stop
        self._started = False
        self._stages: dict[StageName, Stage] = {}
        self._beats: Beats | None = None
        self._kv_usage = 0.0
        self._staging: Staging | None = None
        self._idle: Idle | None = None

    def checks(self) -> list[Check]:
        return [
            Check("broker", self._check_broker),
            Check("engine", self._check_engine),
            Check("listed", self._check_listed),
        ]

    async def _check_broker(self) -> None:
        if self.bus is None:
            raise Unavailable("not connected to the broker yet")
        await self.bus.check_storing()

    async def _check_engine(self) -> None:
        if not self._started:
            raise Unavailable("the engine is starting")
        await self._engine.check()

    async def _check_listed(self) -> None:
        """Ready means that jobs are taken, and that whoever looks for workers sees this one."""
        if self._beats is None or not self._beats.stored:
            raise Unavailable("no beat of this worker is stored yet")

    @contextlib.asynccontextmanager
    async def connected(self, name: str, consumers: list[tuple[str, str]]) -> AsyncIterator[None]:
        """The broker, and all there that the stages pull from. Raises Misconfigured or Unavailable."""
        began = time.monotonic()
        async with connected(self._settings.bus, name, self._stop) as self.bus:
            await self.bus.check_consumers(consumers)
            self._start.parts_s["broker"] = time.monotonic() - began
            yield

    @contextlib.asynccontextmanager
    async def engine_running(self) -> AsyncIterator[None]:
        """The engine, started; a stop signal during the start ends it."""
        starting = asyncio.create_task(self._start_engine())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                self._started = True
            yield
        finally:
            stopping.cancel()
            starting.cancel()
            self._started = False
            await self._engine.close()

    async def _start_engine(self) -> None:
        with self._start.part("engine"):
            await self._engine.start()

    @contextlib.asynccontextmanager
    async def parts(self, telemetry: Telemetry) -> AsyncIterator[_Parts]:
        assert self.bus is not None
        outbox, watch = Outbox(self.bus), Watch(self.bus)
        try:
            # Patiently: a broker that is away for a moment must not cost the engine that was just loaded.
            await self.bus.patiently(outbox.start)
            yield _Parts(outbox, watch, telemetry)
        finally:
            await outbox.close()

    async def work(self, handlers: Mapping[StageName, Handler[Any]], parts: _Parts) -> None:
        """Run the loop of each stage, and the beats, until the stop signal or the loss of the broker."""
        assert self.bus is not None
        for stage, handler in handlers.items():
            costs = CostMeter(self._engine.info.chunk_tokens, self._engine.info.kv_bytes_per_token)
            self._stages[stage] = Stage(self._loop(self.bus, stage, handler, parts, costs), costs)
        await self.bus.patiently(partial(self.bus.serve, subjects.drain(self._worker), "", self._drain))
        idle_s = self._settings.worker.idle_exit_s
        self._idle = Idle(idle_s, self._occupied) if idle_s else None
        self._start.ready(self._engine.info.start_s)
        self._metrics.started(self._start.parts_s)
        log.info("ready", extra={"worker": self._worker, "model": self._engine.info.model, "slots": self._slots})
        log.info("start took", extra={f"{name}_s": round(s, 2) for name, s in self._start.parts_s.items()})
        said = about(self._engine.info, self._settings.kv)
        self._beats = Beats(
            self.bus, self._worker, self._engine.info, self._slots, self._stages, said, lambda: self._kv_usage
        )
        self._count_busy()
        async with asyncio.TaskGroup() as group:
            beats = self._beats.run(self._settings.limits.worker_ttl_s)
            side = [group.create_task(beats), group.create_task(self._stats())]
            if (staging := self._staging) is not None:
                await self.bus.patiently(partial(self.bus.follow, subjects.LIVE_STATES, staging.hear))
                side.append(group.create_task(staging.run()))
            if self._idle is not None:
                side.append(group.create_task(self._end_when(self._idle)))
            lost = group.create_task(self.bus.watch(self._stop))
            loops = [
                group.create_task(loop.run(self._stop)) for loop in (stage.loop for stage in self._stages.values())
            ]
            await asyncio.wait(loops)
            for task in (*side, lost):
                task.cancel()

    async def _end_when(self, idle: Idle) -> None:
        await idle.over()
        log.info("idle: no job for %g s", idle.after_s)
        self._stop.because("idle")

    def _busy(self) -> int:
        return sum(stage.loop.busy for stage in self._stages.values())

    def _occupied(self) -> int:
        """Jobs held, and stages that take none for want of room: neither is idleness."""
        return self._busy() + sum(stage.loop.held_up for stage in self._stages.values())

    @property
    def _slots(self) -> int:
        return min(self._settings.worker.slots, self._engine.info.slots)

    def _loop(self, bus: Bus, stage: StageName, handler: Handler[Any], parts: _Parts, costs: CostMeter) -> Loop:
        info = self._engine.info
        room = Room(bus, info.model, self._settings.kv.room_bytes) if stage == "prefill" else None
        delegation = Delegation(bus, parts.watch, self._metrics, self._worker, info.contract)
        fleet = Fleet(bus)
        preference = Preference(fleet, self._metrics, self._worker, lambda: self._stages[stage].loop.busy)
        if stage == "decode" and self._settings.kv.mode != "host":
            self._staging = self._stager(bus, fleet)
        worker = StageWorker(
            stage,
            handler,
            bus=bus,
            outbox=parts.outbox,
            watch=parts.watch,
            telemetry=parts.telemetry,
            metrics=self._metrics,
            worker=self._worker,
            max_attempts=self._settings.worker.max_attempts,
            costs=costs,
            room=room,
            delegation=delegation if stage == "decode" else None,
            preference=preference if stage == "decode" else None,
            staging=self._staging if stage == "decode" else None,
            start=self._start,
        )
        consumers = [name for _, name in _consumers(stage, info.model)]
        return Loop(
            Puller(bus, subjects.STAGE_STREAM[stage], consumers),
            worker.process,
            slots=self._slots,
            ack_wait_s=self._settings.limits.ack_wait_s,
            stall_s=self._settings.worker.stall_s,
            drain_s=self._settings.worker.drain_s,
            on_change=lambda _: self._count_busy(),
            admit=room.wait if room is not None else None,
        )

    def _stager(self, bus: Bus, fleet: Fleet) -> Staging:
        """For a worker whose tier is its own."""
        info, key = self._engine.info, read_key(self._settings.kv.key_file)

        async def stage(job: DecodeJob) -> int:
            return await self._engine.stage(unpack_ids(job.prompt), salt(info.contract, job.tenant, key))

        return Staging(
            bus,
            fleet,
            self._metrics,
            self._worker,
            model=info.model,
            contract=info.contract,
            full=lambda: self._stages["decode"].loop.busy >= self._slots,
            stage=stage,
            room_bytes=self._settings.kv.room_bytes // STAGED_SHARE,
        )

    async def _drain(self, subject: str, data: bytes) -> bytes:
        """Stop as on SIGTERM: what runs may take the drain time."""
        log.info("told to drain")
        self._stop.because("drain")
        return encode_json(DrainReply(worker=self._worker, busy=self._busy()))

    def _count_busy(self) -> None:
        if self._idle is not None:
            self._idle.changed()
        self._metrics.slots(self._busy(), self._slots * len(self._stages))

    async def _stats(self) -> None:
        while True:
            stats = await self._engine.stats()
            self._kv_usage = float(stats.get("kv_usage", 0.0))
            self._metrics.engine(stats)
            await asyncio.sleep(STATS_S)
