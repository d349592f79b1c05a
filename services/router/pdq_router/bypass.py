"""What waits for a prefill worker that does not come goes on to decode, which computes the prompt itself.

Only where prefill scales from zero (`prefill_start_s`): there a router gives jobs to prefill that nobody may ever come
for. The request gets its `prefilled`, with a promise of nothing, before its decode job is published, as from any
prefill worker; so a worker that comes after all finds it done. The oldest job stays queued until its deadline, though
there is nothing left to do for it: it is what the scaler counts, so prefill is still waited for, and it tells all
routers that none has come in time, so that nothing more has to wait (`order.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import NewerVersion, NotDecodable, PdqError
from pdq.log import Entry, RequestLog, follow
from pdq.messages import LocalCause, PrefillJob, Promise, State, decode_job
from pdq.stage.jobs import handoff_of, publish_job
from pdq.telemetry import Metrics

from pdq_router.workers import Workers

log = logging.getLogger("pdq.router")

LOOK_S = 1.0
CAUSE: LocalCause = "no_prefill_worker"
TRACE_HEADERS = frozenset({"traceparent", "tracestate"})


class Bypass:
    """Of all models of a router; each router looks, and they do the same. start_s: above 0."""

    def __init__(self, bus: Bus, metrics: Metrics, start_s: float) -> None:
        self._bus = bus
        self._metrics = metrics
        self._start_s = start_s
        self._log = RequestLog(bus)
        self._workers = Workers(bus)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except PdqError as exc:
                # The queue of decode may be full, or the broker away: what waits is looked at again.
                log.debug("bypass of prefill: %s", exc)

    async def _look(self) -> None:
        """At all jobs that have waited for too long, the oldest first."""
        models: set[str] = set()
        stored = await self._next(0)
        while stored is not None and time.time() - stored.time_s >= self._start_s:
            model = subjects.parse_job(stored.subject).model
            if not (await self._workers.stages(model)).prefill.workers:
                await self._pass_on(stored, oldest=model not in models)
                models.add(model)
            stored = await self._next(stored.seq)

    async def _next(self, after: int) -> Stored | None:
        return await self._bus.first(subjects.PREFILL, subjects.any_job("prefill", "*", "*"), after=after)

    async def _pass_on(self, stored: Stored, *, oldest: bool) -> None:
        try:
            job = decode_job(stored.data, PrefillJob)
        except (NotDecodable, NewerVersion):
            return
        if not job.handoff:
            # Decode waits for it, and knows for how long.
            return
        entry = await self._give_up(job)
        promise = entry.state.promise if entry is not None and not entry.state.ended else None
        if entry is not None and promise is not None and not entry.state.decode.attempt:
            headers = {name: value for name, value in stored.headers.items() if name.lower() in TRACE_HEADERS}
            await publish_job(self._bus, handoff_of(job, promise), entry, headers)
        if not oldest or time.time() >= job.deadline:
            await self._bus.purge(subjects.PREFILL, subjects.any_job("prefill", job.tenant, job.request))

    async def _give_up(self, job: PrefillJob) -> Entry | None:
        """Store a promise of nothing, unless there is one, or decode or an end was sooner. Returns the newest."""
        nonce = ""

        def without(newest: Entry | None) -> State | None:
            nonlocal nonce
            if newest is None or not waits(newest.state, time.time() - self._start_s):
                return None
            # An owner that is named here is dead, or so late that it may find its claim gone.
            free = msgspec.structs.replace(newest.state.prefill, owner="")
            state = follow(
                newest.state, "prefilled", stage="prefill", local=CAUSE, promise=Promise(cause=CAUSE), prefill=free
            )
            nonce = state.nonce
            return state

        entry = await self._log.update(job.tenant, job.request, without)
        if entry is not None and entry.state.nonce == nonce:
            self._metrics.fell_back(CAUSE)
            fields = {"action": "router.bypassed", "request_id": job.request, "model": job.model}
            log.warning("no prefill worker has come: decode computes the prompt", extra=fields)
        return entry


def waits(state: State, since_s: float) -> bool:
    """Whether a request waits for its prefill, and nobody has ended or cancelled it, or claimed it after `since_s`: a
    worker that has come this moment may have no beat that is known here."""
    claimed = bool(state.prefill.owner) and state.at > since_s
    ending = state.ended or state.event == "cancelling"
    return state.promise is None and not state.decode.attempt and not claimed and not ending
