"""Back-pressure: what the queues, or the log, have no room for is refused at once, with the lag and a hint.

Waiting jobs are counted per stage, model and lane, so that a full priority never holds up another; the
streams' own limits are the backstop. A log that is nearly full takes no new request, so that it never has
to drop a token of a running one; when it is fuller still, the router stops pulling, and PDQ_SUBMIT itself
refuses at the publish.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Rejected, Unavailable
from pdq.messages import Lane, StageName

FRESH_S = 0.5
REFUSE_SHARE, STOP_SHARE = 0.80, 0.95
LEAST_RETRY_S = 1.0

Key = tuple[StageName, str, Lane]


class Overloaded(Rejected):
    """Refused for now: `retry_after_s` is a hint, from how long the oldest job has been waiting."""

    def __init__(self, message: str, *, code: str, retry_after_s: float) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Admission:
    """queue_limit: waiting jobs of one stage, model and lane."""

    def __init__(self, bus: Bus, queue_limit: int) -> None:
        self._bus = bus
        self._limit = queue_limit
        self._waiting: dict[Key, tuple[float, int]] = {}
        self._counting = asyncio.Lock()
        self._log: tuple[float, float] = (0.0, 0.0)

    async def check(self, stage: StageName, model: str, lane: Lane) -> None:
        """Raise Overloaded when there is no room for one more job. Raises Unavailable."""
        if (share := await self._log_share()) >= REFUSE_SHARE:
            message = f"the request log is {share:.0%} full; new requests are refused from {REFUSE_SHARE:.0%} on"
            raise Overloaded(message, code="log_full", retry_after_s=60.0)
        key = (stage, model, lane)
        # One at a time: those admitted since the broker was asked count too, or a burst would slip through.
        async with self._counting:
            waiting = await self._count(key)
            admitted = waiting < self._limit
            if admitted:
                self._waiting[key] = (self._waiting[key][0], waiting + 1)
        if not admitted:
            lag = await self._lag(key)
            held = f"the {stage} queue of {model}, priority {lane}, holds {waiting} waiting jobs"
            hint = max(LEAST_RETRY_S, round(lag, 1))
            message = f"{held}; the limit is {self._limit}, the oldest waits for {lag:.1f} s: try again in {hint:g} s"
            raise Overloaded(message, code="queue_full", retry_after_s=hint)

    async def wait_for_log(self) -> None:
        """Return once the log has room: until then nothing is pulled, and PDQ_SUBMIT fills and refuses."""
        while True:
            try:
                if await self._log_share() < STOP_SHARE:
                    return
            except Unavailable:
                return
            await asyncio.sleep(FRESH_S)

    async def _count(self, key: Key) -> int:
        at, waiting = self._waiting.get(key, (0.0, 0))
        if time.monotonic() - at > FRESH_S:
            stage, model, lane = key
            info = await self._bus.consumer_info(subjects.STAGE_STREAM[stage], subjects.consumer(model, lane))
            waiting = int(info["num_pending"]) if info is not None else 0
            self._waiting[key] = (time.monotonic(), waiting)
        return waiting

    async def _lag(self, key: Key) -> float:
        """How long the oldest waiting job has been there, seconds, by the broker's clock."""
        stage, model, lane = key
        stream, name = subjects.STAGE_STREAM[stage], subjects.consumer(model, lane)
        info = await self._bus.consumer_info(stream, name)
        if info is None:
            return 0.0
        oldest = await self._bus.first(
            stream, info["config"]["filter_subject"], after=int(info["delivered"]["stream_seq"])
        )
        now_s = datetime.fromisoformat(info["ts"]).timestamp()
        return max(0.0, now_s - oldest.time_s) if oldest is not None else 0.0

    async def _log_share(self) -> float:
        at, share = self._log
        if time.monotonic() - at > FRESH_S:
            info = await self._bus.stream_info(subjects.LOG)
            limit = int(info["config"]["max_bytes"]) if info is not None else 0
            share = int(info["state"]["bytes"]) / limit if info is not None and limit > 0 else 0.0
            self._log = (time.monotonic(), share)
        return share
