"""The stages of a model as they are now: their workers, from their beats, and their queues, from the broker.

Both are asked at most once a second, by the first request that wants to know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from pdq import subjects
from pdq.bus import Bus
from pdq.messages import LANES, StageName
from pdq.stage.fleet import Beats, Fleet, Fresh

from pdq_router.order import StageInputs


class Queue(NamedTuple):
    """Jobs of one consumer; `lag_s`: how long the oldest waiting one has waited, by the broker's clock."""

    waiting: int
    running: int
    lag_s: float


class Stages(NamedTuple):
    """Both stages of one model; the costs are means over those workers that have measured them."""

    prefill: StageInputs
    decode: StageInputs
    kv_bytes_per_token: int
    store_bytes_s: float
    load_bytes_s: float


class Workers:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._fleet = Fleet(bus)
        self._stages = Fresh(self._read)

    async def stages(self, model: str) -> Stages:
        """What is known of a model's stages. Raises Unavailable."""
        return await self._stages.get(model)

    async def _read(self, model: str) -> Stages:
        (prefill, prefill_beats), (decode, decode_beats) = await asyncio.gather(
            self._stage("prefill", model), self._stage("decode", model)
        )
        return stages_of(prefill, prefill_beats, decode, decode_beats)

    async def _stage(self, stage: StageName, model: str) -> tuple[list[Queue], Beats]:
        names = [subjects.consumer(model, lane) for lane in LANES]
        queues = asyncio.gather(*(self._queue(subjects.STAGE_STREAM[stage], name) for name in names))
        beats, found = await asyncio.gather(self._fleet.beats(stage, model), queues)
        return found, beats

    async def _queue(self, stream: str, consumer: str) -> Queue:
        info = await self._bus.consumer_info(stream, consumer)
        if info is None:
            return Queue(0, 0, 0.0)
        waiting, lag_s = int(info["num_pending"]), 0.0
        if waiting:
            after = int(info["delivered"]["stream_seq"])
            oldest = await self._bus.first(stream, info["config"]["filter_subject"], after=after)
            now_s = datetime.fromisoformat(info["ts"]).timestamp()
            lag_s = max(0.0, now_s - oldest.time_s) if oldest is not None else 0.0
        return Queue(waiting, int(info["num_ack_pending"]), lag_s)


def stages_of(prefill: Iterable[Queue], prefill_beats: Beats, decode: Iterable[Queue], decode_beats: Beats) -> Stages:
    """The inputs of an order, from queues and beats. Pure."""
    costs = [beat.costs for beat in (*prefill_beats, *decode_beats)]
    return Stages(
        prefill=_inputs(prefill, prefill_beats),
        decode=_inputs(decode, decode_beats),
        kv_bytes_per_token=max((cost.kv_bytes_per_token for cost in costs), default=0),
        store_bytes_s=_mean(cost.store_bytes_s for cost in costs),
        load_bytes_s=_mean(beat.costs.load_bytes_s for beat in decode_beats),
    )


def _inputs(queues: Iterable[Queue], beats: Beats) -> StageInputs:
    found = list(queues)
    running = sum(queue.running for queue in found)
    return StageInputs(
        workers=len(beats),
        free_slots=max(0, sum(beat.slots for beat in beats) - running),
        waiting=sum(queue.waiting for queue in found),
        running=running,
        lag_s=max((queue.lag_s for queue in found), default=0.0),
        prompt_tokens_s=_mean(beat.costs.prompt_tokens_s for beat in beats),
        kv_usage=min((beat.kv_usage for beat in beats), default=0.0),
    )


def _mean(values: Iterable[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if value]
    return sum(known) / len(known) if known else 0.0
