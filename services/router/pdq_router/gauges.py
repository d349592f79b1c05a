"""Reads what the broker holds every few seconds, for /metrics: queues, live workers, streams.

Each router does; they tell the same. It never ends the service: what cannot be read is not shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import UNREADABLE, NotStored, Unavailable
from pdq.messages import LANES, StageName, WorkerBeat, decode_json
from pdq.telemetry.broker import ANY, BrokerMetrics, Queue, Reading, StageLoad, Stream, contracts_of

log = logging.getLogger("pdq.router")

READ_EVERY_S = 3.0
READ_TIMEOUT_S = 10.0
PAGE = 500
STREAMS = (
    subjects.SUBMIT,
    subjects.PREFILL,
    subjects.DECODE,
    subjects.LOG,
    subjects.REAP,
    subjects.DEAD,
    subjects.WORKERS,
)


class Gauges:
    """`models`: the slugs whose queues are read."""

    def __init__(self, bus: Bus, metrics: BrokerMetrics, models: Sequence[str]) -> None:
        self._bus = bus
        self._metrics = metrics
        self._models = models
        self._failing = False
        self._differing: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Read and show until cancelled."""
        while True:
            await self._show()
            await asyncio.sleep(READ_EVERY_S)

    async def _show(self) -> None:
        reading = None
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                reading = await self._read()
        except (Unavailable, TimeoutError) as exc:
            if not self._failing:
                log.warning("queues cannot be read: %s", exc or "no answer in time")
        except Exception:
            if not self._failing:
                log.exception("queues cannot be read")
        self._failing = reading is None
        self._metrics.show(reading)
        if reading is not None:
            self._warn_of_contracts(reading)

    def _warn_of_contracts(self, reading: Reading) -> None:
        """Say it once for as long as it lasts: workers of different contracts compute each other's prompts anew."""
        found = contracts_of(reading.loads)
        differing = frozenset(model for model, contracts in found.items() if len(contracts) > 1)
        for model in sorted(differing - self._differing):
            log.warning(
                "live workers of %s have %d KV contracts, and exchange no KV across them; see `pdq doctor`",
                model,
                len(found[model]),
                extra={"cause": "contract"},
            )
        self._differing = differing

    async def _read(self) -> Reading:
        began = time.monotonic()
        streams = [await self._stream(name) for name in STREAMS]
        queues = [await self._queue("route", ANY, ANY, subjects.SUBMIT, subjects.ROUTER_CONSUMER)]
        loads = []
        for stage, stream in subjects.STAGE_STREAM.items():
            for model in self._models:
                loads.append(await self._load(stage, model))
                for lane in LANES:
                    queues.append(await self._queue(stage, model, lane, stream, subjects.consumer(model, lane)))
        return Reading(
            queues=tuple(filter(None, queues)),
            loads=tuple(loads),
            streams=tuple(filter(None, streams)),
            took_s=time.monotonic() - began,
            stores=await self._stores(),
        )

    async def _stores(self) -> bool:
        try:
            await self._bus.check_storing()
        except NotStored:
            return False
        return True

    async def _stream(self, name: str) -> Stream | None:
        info = await self._bus.stream_info(name)
        if info is None:
            return None
        state, limit = info["state"], int(info["config"]["max_bytes"])
        replicas = info.get("cluster", {}).get("replicas", ())
        return Stream(
            name=name,
            messages=state["messages"],
            bytes=state["bytes"],
            max_bytes=max(0, limit),
            behind=sum(not replica.get("current", False) for replica in replicas),
        )

    async def _queue(self, stage: str, model: str, priority: str, stream: str, consumer: str) -> Queue | None:
        info = await self._bus.consumer_info(stream, consumer)
        if info is None:
            return None
        depth, claimed = int(info["num_pending"]), int(info["num_ack_pending"])
        waiting_s = await self._age(stream, info, int(info["delivered"]["stream_seq"])) if depth else 0.0
        return Queue(
            stage=stage,
            model=model,
            priority=priority,
            depth=depth,
            claimed=claimed,
            oldest_s=waiting_s,
            oldest_unsettled_s=await self._age(stream, info, 0) if claimed else waiting_s,
        )

    async def _age(self, stream: str, info: dict[str, Any], after: int) -> float:
        """Age of a consumer's first message after a sequence, seconds, by the broker's clock alone."""
        stored = await self._bus.first(stream, info["config"]["filter_subject"], after=after)
        now_s = datetime.fromisoformat(info["ts"]).timestamp()
        return max(0.0, now_s - stored.time_s) if stored is not None else 0.0

    async def _load(self, stage: StageName, model: str) -> StageLoad:
        beats: list[WorkerBeat] = []
        after, more = 0, True
        while more:
            page = await self._bus.read(subjects.WORKERS, subjects.workers_of(stage, model), after=after, limit=PAGE)
            for stored in page:
                after = stored.seq
                with contextlib.suppress(*UNREADABLE):
                    beats.append(decode_json(stored.data, WorkerBeat))
            more = len(page) == PAGE
        return StageLoad(
            stage=stage,
            model=model,
            workers=len(beats),
            slots=sum(beat.slots for beat in beats),
            busy=sum(beat.busy for beat in beats),
            contracts=frozenset(beat.contract for beat in beats),
        )
