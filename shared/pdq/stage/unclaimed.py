"""What a stage does about jobs that it has not claimed, and what is done after every end."""

from __future__ import annotations

import logging

from pdq import subjects
from pdq.bus import Bus, Delivery
from pdq.errors import NotDecodable, Unavailable
from pdq.log import Change, Entry, RequestLog, erase, first, follow
from pdq.messages import ErrorInfo, Job, StageName, State
from pdq.stage import claims
from pdq.stage.dead import DeadLetters
from pdq.stage.delegation import drop_prefill, leave_to_decode
from pdq.telemetry import Metrics

log = logging.getLogger("pdq.stage")


class Unclaimed:
    """Of one stage of one worker."""

    def __init__(self, bus: Bus, request_log: RequestLog, metrics: Metrics, stage: StageName, worker: str) -> None:
        self._bus = bus
        self._log = request_log
        self._metrics = metrics
        self._stage = stage
        self._worker = worker
        self._dead = DeadLetters(bus, metrics, worker)

    def count_end(self, state: State) -> None:
        self._metrics.ended(state.model, state.order, state.event, state.lasted_s)

    async def tidy(self, tenant: str, request: str, *, delegated: bool) -> None:
        """Remove what still waits for an ended request. It would find it ended, so this may fail.

        delegated: a prefill job of it may be queued.
        """
        try:
            await self._bus.purge(subjects.REAP, subjects.timer(tenant, request))
        except Unavailable as exc:
            log.debug("timer of %s stays: %s", request, exc)
        if delegated:
            await drop_prefill(self._bus, tenant, request)

    async def erase_purged(self, tenant: str, request: str) -> None:
        """Remove what was written of a request after it was purged. A sweep comes later anyway, so this may fail."""
        try:
            if await self._log.current(tenant, request) is None:
                await erase(self._bus, tenant, request)
        except Unavailable as exc:
            log.debug("what was written of %s after its purge stays: %s", request, exc)

    async def undecodable(self, delivery: Delivery, exc: NotDecodable) -> None:
        """A job nobody can read: the subject names the request, which fails."""
        await self.give_up(delivery, ErrorInfo(code=exc.code, message=str(exc)), known=False)

    async def give_up(self, delivery: Delivery, error: ErrorInfo, *, trace: str = "", known: bool = True) -> None:
        """Nobody will do this job: a dead letter, and the request fails, unless decode can do without.

        known: the log had the request; if it has not any more, it was purged, and the letter goes too.
        """
        where = subjects.parse_job(delivery.subject)
        await self.bury(delivery, where.request, error, trace=trace)
        if self._stage != "prefill" or not await leave_to_decode(
            self._log, self._metrics, where.tenant, where.request, error, self._worker
        ):
            await self._fail(delivery, error, known)
        await delivery.term(error.code)

    async def _fail(self, delivery: Delivery, error: ErrorInfo, known: bool) -> None:
        """End the request of a job as `failed`, unless it has ended; one that nobody knew begins with it."""
        where = subjects.parse_job(delivery.subject)

        def failing(newest: Entry | None) -> State | None:
            if newest is None:
                return None if known else first("failed", model=where.model, error=error)
            return None if newest.state.ended else claims.failed(newest.state, error)

        await self._end(where.tenant, where.request, failing)

    async def end(self, job: Job, end: State) -> None:
        """End a request as `end` says, unless it has ended."""

        def ending(newest: Entry | None) -> State | None:
            if newest is None or newest.state.ended:
                return None
            return follow(newest.state, end.event, cause=end.cause, error=end.error)

        await self._end(job.tenant, job.request, ending)

    async def _end(self, tenant: str, request: str, change: Change) -> None:
        entry, ours = await self._log.end(tenant, request, change)
        if entry is None:
            await erase(self._bus, tenant, request)
        elif ours:
            self.count_end(entry.state)
        await self.tidy(tenant, request, delegated=entry is not None and claims.delegated(entry.state))

    async def bury(
        self, delivery: Delivery, request: str, error: ErrorInfo, *, attempts: int = 0, trace: str = ""
    ) -> None:
        """Put a job into PDQ_DEAD."""
        where = subjects.parse_job(delivery.subject)
        await self._dead.bury(
            self._stage,
            where.tenant,
            where.model,
            request,
            error,
            subject=delivery.subject,
            body=delivery.data,
            headers=delivery.headers,
            attempts=attempts or delivery.num_delivered,
            trace=trace,
        )
