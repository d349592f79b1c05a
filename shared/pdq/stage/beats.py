"""Beats: a worker's word, every few seconds, that it is alive, and how."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import msgspec

from pdq import subjects
from pdq.bus import Bus
from pdq.engines.base import EngineInfo
from pdq.errors import Unavailable
from pdq.messages import StageName, WorkerBeat, encode_json
from pdq.stage.costs import CostMeter
from pdq.stage.loop import Loop


class Stage(msgspec.Struct, frozen=True):
    """One stage of a worker, as its beats tell of it."""

    loop: Loop
    costs: CostMeter


class Beats:
    """Of all stages of one worker. `kv_usage`: the share of the engine's KV that is in use now."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        info: EngineInfo,
        slots: int,
        stages: Mapping[StageName, Stage],
        about: dict[str, str],
        kv_usage: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._info = info
        self._slots = slots
        self._stages = stages
        self._about = about
        self._kv_usage = kv_usage
        self._stored: set[StageName] = set()

    @property
    def stored(self) -> bool:
        """Whether a beat of every stage was stored: whoever looks for workers sees this one."""
        return self._stored == set(self._stages)

    async def run(self, ttl_s: float) -> None:
        """Until cancelled; then takes the worker off the list. The list forgets after `ttl_s` who is silent."""
        keys = {stage: subjects.worker_key(stage, self._info.model, self._worker) for stage in self._stages}
        try:
            while True:
                for stage, key in keys.items():
                    with contextlib.suppress(Unavailable):
                        await self._bus.publish(key, encode_json(self._beat(stage)), timeout_s=2)
                        self._stored.add(stage)
                await asyncio.sleep(ttl_s / 3)
        finally:
            with contextlib.suppress(Unavailable):
                for key in keys.values():
                    await self._bus.purge(subjects.WORKERS, key)

    def _beat(self, stage: StageName) -> WorkerBeat:
        return WorkerBeat(
            worker=self._worker,
            stage=stage,
            model=self._info.model,
            contract=self._info.contract,
            slots=self._slots,
            busy=self._stages[stage].loop.busy,
            at=time.time(),
            costs=self._stages[stage].costs.costs(),
            kv_usage=self._kv_usage(),
            about=self._about,
        )
