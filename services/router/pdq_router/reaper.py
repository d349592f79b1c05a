"""The reaper: deadlines that have come, and jobs that the broker gave up on.

The broker keeps a job for ever that was delivered too often; its advisory makes it an end and a dead letter here. (It
never gives up a submit: `route.py`.)
"""

from __future__ import annotations

import json
import logging
import time

from pdq import subjects
from pdq.bus import Bus, Delivery, Stored
from pdq.errors import Retryable
from pdq.log import RequestLog, erase
from pdq.messages import ErrorInfo
from pdq.stage.dead import DeadLetters
from pdq.stage.delegation import leave_to_decode
from pdq.stage.run import Run
from pdq.telemetry import Metrics

from pdq_router.endings import Endings, running
from pdq_router.erasure import accepted

log = logging.getLogger("pdq.router")

GRACE_S = 2.0
"""How long after the deadline a running worker may take to end the request itself."""
ADVISORY = "$JS.EVENT.ADVISORY."


class Reaper:
    """`process` is what the worker loop calls for each message of PDQ_REAP."""

    def __init__(self, bus: Bus, endings: Endings, dead: DeadLetters, metrics: Metrics) -> None:
        self._bus = bus
        self._dead = dead
        self._endings = endings
        self._metrics = metrics
        self._log = RequestLog(bus)

    async def process(self, delivery: Delivery, run: Run) -> None:
        try:
            if delivery.subject.startswith(ADVISORY):
                await self._given_up(delivery)
            else:
                await self._due(delivery)
        except Retryable as exc:
            log.warning("reaper: %s", exc)
            self._metrics.gave_back("reap", exc.code)
            await delivery.nak_for_now()

    async def _due(self, delivery: Delivery) -> None:
        *_, tenant, request = delivery.subject.split(".")
        entry = await self._log.current(tenant, request)
        if entry is None or (entry.state.ended and not accepted(entry.state)):
            # It was purged.
            await erase(self._bus, tenant, request)
            await delivery.ack()
            return
        late = time.time() - entry.state.deadline
        if not entry.state.ended and late < 0:
            await delivery.nak(min(-late, 1.0) + 0.01)
            return
        if not entry.state.ended and running(entry.state) and late < GRACE_S:
            await delivery.nak(GRACE_S - late)
            return
        if not entry.state.ended:
            error = ErrorInfo(code="deadline_exceeded", message="the deadline passed while the request waited")
            await self._endings.end(tenant, request, "expired", error=error)
            log.info("expired", extra={"action": "reaper.expired", "request_id": request})
        await delivery.ack()

    async def _given_up(self, delivery: Delivery) -> None:
        advisory = json.loads(delivery.data)
        stream, seq = str(advisory["stream"]), int(advisory["stream_seq"])
        stored = await self._bus.get(stream, seq)
        if stored is not None:
            await self._give_up(stream, stored, int(advisory.get("deliveries", 0)))
            await self._bus.delete(stream, seq)
        await delivery.ack()

    async def _give_up(self, stream: str, stored: Stored, deliveries: int) -> None:
        where = subjects.parse_job(stored.subject)
        message = f"the {where.stage} message was delivered {deliveries} times and never settled"
        error = ErrorInfo(code="too_many_deliveries", message=message)
        known = await self._log.current(where.tenant, where.request)
        await self._dead.bury(
            where.stage,
            where.tenant,
            where.model,
            where.request,
            error,
            subject=stored.subject,
            body=stored.data,
            headers=stored.headers,
            attempts=deliveries,
        )
        if stream != subjects.PREFILL or not await leave_to_decode(
            self._log, self._metrics, where.tenant, where.request, error
        ):
            ended = await self._endings.end(where.tenant, where.request, "failed", error=error)
            if known is not None and ended is None:
                # It was purged meanwhile, and goes with its letter.
                await erase(self._bus, where.tenant, where.request)
