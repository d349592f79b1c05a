"""decode-first: a decode worker that has a job, and a slot for it, lets a prefill worker make the KV it lacks.

It publishes a prefill job that wants no handoff, and waits for `prefilled` in the request's log. Whatever keeps
that from coming in time, it writes `local`, takes the prefill job back, and computes the prompt itself. An attempt
that follows a dead one finds in the log what was begun: it waits for that, and begins nothing anew.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable

from pdq import subjects
from pdq.bus import Bus
from pdq.engines.base import Phase
from pdq.errors import Interrupted, QueueFull, Unavailable
from pdq.log import Entry, RequestLog, follow
from pdq.messages import DecodeJob, ErrorInfo, LocalCause, PrefillJob, Promise, State
from pdq.stage import claims
from pdq.stage.fleet import Fleet
from pdq.stage.jobs import publish_job
from pdq.stage.run import Run
from pdq.stage.watch import Heard, Watch
from pdq.stage.work import ClaimedJob
from pdq.telemetry import Metrics

LOOK_S = 1.0
"""While nothing is heard, the log and the workers are looked at so often: a live copy can be lost."""

Missing = Callable[[], Awaitable[int]]
"""Asks how many tokens of the prompt's whole chunks would have to be computed here."""


class Delegation:
    """Has prompts prefilled for the decode jobs of one worker. `contract`: of the KV that it can use."""

    def __init__(self, bus: Bus, watch: Watch, metrics: Metrics, worker: str, contract: str) -> None:
        self._bus = bus
        self._log = RequestLog(bus)
        self._fleet = Fleet(bus)
        self._watch = watch
        self._metrics = metrics
        self._worker = worker
        self._contract = contract

    async def promise(self, work: ClaimedJob, run: Run, missing: Missing) -> Promise | None:
        """What can be loaded, once it can be; None: decode computes the prompt itself, as far as it must.

        Waits for at most the job's `prefill_wait_s`, and counts as progress. Raises Interrupted when the request
        ends meanwhile or is another's, and Unavailable when the broker does not take the job.
        """
        state = work.state
        if state.promise is None and not state.local:
            # What an earlier attempt has delegated is not looked at again: it may be on its way.
            if state.prefill.attempt or await missing():
                await self._delegate(work, run)
        return work.state.promise

    async def _delegate(self, work: ClaimedJob, run: Run) -> None:
        start_ns = time.time_ns()
        try:
            with self._watch.hearing(work.job.tenant, work.job.request) as heard:
                cause = await self._begin(work) or await self._wait(work, run, heard)
                if cause:
                    await self._go_local(work, cause)
            work.delegated = False
        finally:
            promise, local = work.state.promise, work.state.local
            told: dict[str, str | int | float | bool] = {"pdq.kv.tokens": promise.tokens if promise else 0}
            phase = Phase(
                name="kv.wait",
                start_ns=start_ns,
                end_ns=time.time_ns(),
                attributes=told | ({"pdq.local": local} if local else {}),
            )
            work.took(phase)
            self._metrics.phase(phase)

    async def _begin(self, work: ClaimedJob) -> LocalCause | None:
        """Queue the prefill job; that it is queued already is fine. Returns what keeps it from that."""
        assert isinstance(work.job, DecodeJob)
        if not await self._anyone(work.job.model):
            return "no_prefill_worker"
        work.delegated = True
        try:
            await publish_job(self._bus, prefill_of(work.job), work.entry, work.span.headers())
        except QueueFull:
            return "queue_full"
        return None

    async def _wait(self, work: ClaimedJob, run: Run, heard: Heard) -> LocalCause | None:
        """Wait until there is a promise, or somebody has given it up. Returns why there will be none in time."""
        assert isinstance(work.job, DecodeJob)
        give_up = time.monotonic() + work.job.prefill_wait_s
        while (left := give_up - time.monotonic()) > 0:
            run.progress()
            entry = await heard.next(min(left, LOOK_S))
            if entry is None:
                if not await self._anyone(work.job.model):
                    return "no_prefill_worker"
                entry = await self._look(work)
            if entry is not None and self._decided(work, entry):
                return None
        return "late"

    def _decided(self, work: ClaimedJob, entry: Entry) -> bool:
        if entry.seq <= work.entry.seq:
            return False
        _check_ours(work, entry)
        if entry.state.promise is None and not entry.state.local:
            return False
        work.entry = entry
        return True

    async def _go_local(self, work: ClaimedJob, cause: LocalCause) -> None:
        """Write `local`, unless the promise came after all, and take the prefill job back."""

        def local(newest: Entry | None) -> State | None:
            _check_ours(work, newest)
            assert newest is not None
            if newest.state.promise is not None or newest.state.local:
                return None
            return follow(newest.state, "local", stage="decode", worker=self._worker, local=cause)

        entry = await self._log.update(work.job.tenant, work.job.request, local, known=work.entry)
        assert entry is not None
        work.entry = entry
        if entry.state.event == "local":
            self._metrics.fell_back(cause)
            work.span.event("local", {"cause": cause})
            await drop_prefill(self._bus, work.job.tenant, work.job.request)

    async def _anyone(self, model: str) -> bool:
        """Whether a prefill worker is alive whose KV is of use here; what cannot be asked is taken for a yes."""
        try:
            return await self._fleet.anyone("prefill", model, self._contract)
        except Unavailable:
            return True

    async def _look(self, work: ClaimedJob) -> Entry | None:
        entry = None
        with contextlib.suppress(Unavailable):
            entry = await self._log.current(work.job.tenant, work.job.request)
            if entry is None:
                raise Interrupted("ended")
        return entry


def _check_ours(work: ClaimedJob, newest: Entry | None) -> None:
    """Raise Interrupted when the request has ended, is being cancelled, or is another attempt's."""
    if lost := claims.owns(newest, "decode", work.attempt):
        raise Interrupted(lost)
    if newest is not None and newest.state.event == "cancelling":
        raise Interrupted("cancelled")


def prefill_of(job: DecodeJob) -> PrefillJob:
    """The job that makes the KV of this one's prompt, and hands nothing over."""
    return PrefillJob(
        request=job.request,
        tenant=job.tenant,
        model=job.model,
        priority=job.priority,
        deadline=job.deadline,
        prompt=job.prompt,
        sampling=job.sampling,
        handoff=False,
    )


async def leave_to_decode(
    log: RequestLog, metrics: Metrics, tenant: str, request: str, error: ErrorInfo, worker: str = ""
) -> bool:
    """A prefill job is given up: where decode has delegated it, tell decode so, whose request it is.

    False: nobody has delegated it, and the request is to be ended. Raises Unavailable.
    """
    nonce = ""

    def left(newest: Entry | None) -> State | None:
        nonlocal nonce
        if newest is None or not claims.delegated(newest.state) or newest.state.ended:
            return None
        if newest.state.local or newest.state.promise is not None:
            return None
        state = claims.left(newest.state, worker, error)
        nonce = state.nonce
        return state

    entry = await log.update(tenant, request, left)
    if entry is not None and entry.state.nonce == nonce:
        metrics.fell_back("prefill_failed")
    return entry is not None and claims.delegated(entry.state)


async def drop_prefill(bus: Bus, tenant: str, request: str) -> None:
    """Take a delegated job back. One that stays is dropped by whoever takes it, so this may fail."""
    with contextlib.suppress(Unavailable):
        await bus.purge(subjects.PREFILL, subjects.any_job("prefill", tenant, request))
