"""A conversation prefers the decode worker that had its last turn, and may still hold its KV.

Any worker may take its job. One that takes a job that prefers another gives it back at once, before it claims
anything, and the broker hands it to the next one that waits. It does so only while the preferred worker is alive, has
a free slot, and is not far busier than this one; only a few times, and only with a young job: whoever has it otherwise
serves it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from pdq.bus import Delivery
from pdq.errors import Unavailable
from pdq.messages import DecodeJob, WorkerBeat
from pdq.stage.fleet import Fleet
from pdq.telemetry import Metrics

MOST_PASSES = 3
YOUNG_S = 0.3
"""A job that has waited longer is not given back."""
BUSIER = 0.5
"""The preferred worker may have so much more of its slots taken than this one."""
ASK_TIMEOUT_S = 0.2

Preferred = Literal["none", "kept", "passed", "spilled"]
"""What became of a job's wish: it had none; this is its worker; it is given back; it is served here all the same."""


def judge(
    prefer: str, worker: str, *, deliveries: int, waited_s: float, busy: int, beat: WorkerBeat | None
) -> Preferred:
    """What a worker does with a job that it was just handed. Pure.

    deliveries: this one included. busy: this worker's other jobs. beat: of the preferred worker; None: it is not alive.
    """
    if not prefer or prefer == worker:
        return "kept" if prefer else "none"
    if beat is None or deliveries > MOST_PASSES or waited_s >= YOUNG_S:
        return "spilled"
    room = beat.busy < beat.slots and beat.busy - busy <= BUSIER * beat.slots
    return "passed" if room else "spilled"


class Preference:
    """Of one decode worker. `busy`: the number of its jobs, the newest included."""

    def __init__(self, fleet: Fleet, metrics: Metrics, worker: str, busy: Callable[[], int]) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._worker = worker
        self._busy = busy

    async def judge(self, job: DecodeJob, delivery: Delivery) -> Preferred:
        """See `judge`; counted. Who prefers nobody else costs no question to the broker."""
        asks = job.prefer not in ("", self._worker) and delivery.num_delivered <= MOST_PASSES
        found = judge(
            job.prefer,
            self._worker,
            deliveries=delivery.num_delivered,
            waited_s=time.time() - delivery.stored_s,
            busy=self._busy() - 1,
            beat=await self._beat(job) if asks else None,
        )
        if found != "none":
            self._metrics.preferred(found)
        return found

    async def _beat(self, job: DecodeJob) -> WorkerBeat | None:
        """The newest beat of the worker that a job prefers; None also when the broker does not tell soon."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await self._fleet.beat("decode", job.model, job.prefer)
        except (Unavailable, TimeoutError):
            return None


def passed_before(job: DecodeJob, delivery: Delivery) -> bool:
    """Whether a job likely comes again only because others gave it back for the sake of its preference."""
    young = time.time() - delivery.stored_s < YOUNG_S + ASK_TIMEOUT_S
    return bool(job.prefer) and young and delivery.num_delivered <= MOST_PASSES + 1
