"""One stage of one worker: decode the job, claim it, let the handler work, settle.

Used by prefill and decode alike; what differs is the handler and the kind of job.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from pdq import subjects
from pdq.bus import Bus, Delivery, Outbox
from pdq.engines.base import Tokens
from pdq.errors import NewerVersion, NotDecodable, PdqError, Retryable
from pdq.log import Entry, OutputWriter, RequestLog, Transcript
from pdq.messages import DecodeJob, Job, PrefillJob, StageName, State, decode_job
from pdq.stage import claims, recovery
from pdq.stage.attempt import Attempt, Delegate, Handler, Handoff, Outcome
from pdq.stage.costs import CostMeter
from pdq.stage.delegation import Delegation
from pdq.stage.jobs import known_of
from pdq.stage.preference import Preference, Preferred, passed_before
from pdq.stage.room import Room
from pdq.stage.run import Run
from pdq.stage.settlement import Settlement
from pdq.stage.staging import Staging
from pdq.stage.watch import Watch
from pdq.stage.work import ClaimedJob, first_token_ns
from pdq.telemetry import Metrics, StageSpan, Start, Telemetry

log = logging.getLogger("pdq.stage")

KINDS: dict[StageName, type[PrefillJob] | type[DecodeJob]] = {"prefill": PrefillJob, "decode": DecodeJob}


class StageWorker:
    """`process` is what a `Loop` calls for each delivery."""

    def __init__(
        self,
        stage: StageName,
        handler: Handler[Any],
        *,
        bus: Bus,
        outbox: Outbox,
        watch: Watch,
        telemetry: Telemetry,
        metrics: Metrics,
        worker: str,
        max_attempts: int,
        costs: CostMeter | None = None,
        room: Room | None = None,
        delegation: Delegation | None = None,
        preference: Preference | None = None,
        staging: Staging | None = None,
        start: Start | None = None,
    ) -> None:
        """costs: told of what was done. room: told of the KV that prefill hands off. delegation: has prompts
        prefilled for decode; without it decode computes them. preference: which decode jobs are left to others.
        staging: brought KV near for jobs that waited. start: the worker's own, for jobs that waited for it."""
        self._start = start
        self._costs = costs
        self._room = room
        self._delegation = delegation
        self._preference = preference
        self._staging = staging
        self.stage = stage
        self._handler = handler
        self._log = RequestLog(bus)
        self._outbox = outbox
        self._watch = watch
        self._telemetry = telemetry
        self._metrics = metrics
        self._worker = worker
        self._max_attempts = max_attempts
        self._settlement = Settlement(bus, self._log, metrics, stage, worker, max_attempts)

    async def process(self, delivery: Delivery, run: Run) -> None:
        where = subjects.parse_job(delivery.subject)
        job = self._read(delivery, where)
        preferred: Preferred = "none"
        if self._preference is not None and isinstance(job, DecodeJob):
            preferred = await self._preference.judge(job, delivery)
            if preferred == "passed":
                await delivery.nak()
                return
        if delivery.num_delivered > 1 and not (isinstance(job, DecodeJob) and passed_before(job, delivery)):
            self._metrics.redelivered(self.stage)
        with self._telemetry.process(
            self.stage,
            delivery.stream,
            delivery.headers,
            request=where.request,
            tenant=where.tenant,
            model=where.model,
            worker=self._worker,
            stored_ns=delivery.stored_ns,
            message_id=str(delivery.seq),
            deliveries=delivery.num_delivered,
        ) as span:
            try:
                if self._start is not None:
                    self._start.show(span, delivery.stored_ns)
                if preferred != "none":
                    span.set(preferred=preferred)
                await self._process(delivery, run, job, span)
            except Retryable as exc:
                # The broker did not take our word, or a newer build's is beyond us: whoever is given the message next
                # goes by the state.
                log.warning("%s: %s", self.stage, exc, extra={"request_id": where.request, "code": exc.code})
                span.fail(exc.code, str(exc))
                self._metrics.gave_back(self.stage, exc.code)
                await _give_back(delivery, exc)

    def _read(self, delivery: Delivery, where: subjects.JobSubject) -> Job | NotDecodable | NewerVersion:
        try:
            job = decode_job(delivery.data, KINDS[self.stage])
            _check_subject(job, where)
        except (NotDecodable, NewerVersion) as exc:
            return exc
        return job

    async def _process(
        self, delivery: Delivery, run: Run, job: Job | NotDecodable | NewerVersion, span: StageSpan
    ) -> None:
        if isinstance(job, NewerVersion):
            raise job
        if isinstance(job, NotDecodable):
            span.fail(job.code, str(job))
            await self._settlement.unclaimed.undecodable(delivery, job)
            return
        work, result = None, None
        # From before the claim, so that nothing after it is missed.
        async with self._watch.following(job.tenant, job.request):
            verdict, entry = await self._claim(job)
            if isinstance(verdict, claims.Claim):
                assert entry is not None
                work = self._claimed(job, entry, delivery, span)
                result = await self._work(work, run)
        if work is not None and result is not None:
            try:
                await self._settlement.settle(work, result)
            finally:
                if work.writer is not None:
                    work.writer.close()
        else:
            await self._leave(verdict, entry, job, delivery, span)

    def _claimed(self, job: Job, entry: Entry, delivery: Delivery, span: StageSpan) -> ClaimedJob:
        attempt = claims.of_stage(entry.state, self.stage).attempt
        span.set(attempt=attempt)
        if self._staging is not None and (staged := self._staging.taken(job.tenant, job.request)):
            span.event("kv.stage", {"pdq.kv.tokens": staged.tokens, "took_ms": round(staged.took_s * 1e3, 3)})
        return ClaimedJob(job, attempt, entry, delivery, span)

    async def _leave(
        self, verdict: claims.Verdict, entry: Entry | None, job: Job, delivery: Delivery, span: StageSpan
    ) -> None:
        """Do what a verdict says that is no claim."""
        match verdict:
            case claims.Drop(reason):
                log.info("%s job dropped: %s", self.stage, reason, extra={"request_id": job.request})
                span.end("dropped")
                await delivery.ack()
            case claims.End(state):
                await self._settlement.unclaimed.end(job, state)
                span.end(state.event)
                await delivery.ack()
            case claims.GiveUp(error, trace):
                span.fail(error.code, error.message)
                await self._settlement.unclaimed.give_up(delivery, error, trace=trace)
            case claims.Resend(state):
                assert state.promise is not None and entry is not None
                await self._settlement.publish_handoff(job, state.promise, entry, span.headers())
                await delivery.ack()

    async def _claim(self, job: Job) -> tuple[claims.Verdict, Entry | None]:
        verdict: claims.Verdict = claims.Drop("not judged")

        def change(newest: Entry | None) -> State | None:
            nonlocal verdict
            verdict = claims.judge(newest, self.stage, self._worker, time.time(), self._max_attempts)
            return verdict.state if isinstance(verdict, claims.Claim) else None

        entry = await self._log.update(job.tenant, job.request, change, known=known_of(job))
        return verdict, entry

    async def _work(self, work: ClaimedJob, run: Run) -> Outcome | Exception:
        job = work.job
        with self._watch.running(job.tenant, job.request, self.stage, work.attempt, run):
            try:
                outcome = await self._handle(work, run)
                self._report(work, outcome)
            except PdqError as exc:
                return exc
            except Exception as exc:
                log.exception("%s failed unexpectedly", self.stage, extra={"request_id": job.request})
                return exc
        return outcome

    async def _handle(self, work: ClaimedJob, run: Run) -> Outcome:
        if isinstance(work.job, DecodeJob):
            work.writer = await self._writer(work)

        async def emit(tokens: Tokens) -> None:
            assert work.writer is not None
            run.progress()
            await work.writer.write(tokens.ids, tokens.text, tokens.logprobs, tokens.held, tokens.delta)

        shown = tuple(work.writer.ids) if work.writer is not None else ()
        attempt = Attempt(
            number=work.attempt,
            traceparent=work.span.traceparent,
            shown=shown,
            emit=emit,
            delegate=self._delegate(work, run),
        )
        work.span.set_sampling(work.job.sampling)
        outcome = await run.guard(self._handler.handle(work.job, attempt), work.job.deadline - time.time())
        if work.writer is not None:
            work.writer.check_end()
        return outcome

    def _delegate(self, work: ClaimedJob, run: Run) -> Delegate | None:
        if self._delegation is None or not isinstance(work.job, DecodeJob) or not work.job.prefill_wait_s:
            return None
        return partial(self._delegation.promise, work, run)

    async def _writer(self, work: ClaimedJob) -> OutputWriter:
        """A writer that knows what earlier attempts showed: the log up to our claim holds it all."""
        job, shown = work.job, Transcript()
        if work.attempt > 1:
            for event in await self._log.read_up_to(job.tenant, job.request, work.entry.seq):
                shown.feed(event)
        begin = recovery.begin(job.sampling, shown)
        if shown.ids:
            work.span.event("recovery", {"shown_tokens": len(shown.ids), "continued_from": begin[0]})
        return OutputWriter(self._outbox, job.tenant, job.request, work.attempt, shown, begin)

    def _report(self, work: ClaimedJob, outcome: Outcome) -> None:
        self._metrics.queue_wait(self.stage, work.span.queue_wait_s)
        if self._room is not None and isinstance(work.job, PrefillJob) and isinstance(outcome, Handoff):
            self._room.stored(outcome.promise.bytes, waits=work.job.handoff)
        if self._costs is not None:
            self._costs.saw(outcome.phases, len(work.job.prompt) // 4)
        for phase in outcome.phases:
            work.span.phase(phase)
            self._metrics.phase(phase)
        first = first_token_ns(outcome.phases)
        if first and work.state.submitted:
            self._metrics.ttft(max(0.0, first / 1e9 - work.state.submitted))
            made = work.writer.num_tokens if work.writer else 0
            last = max(phase.end_ns for phase in outcome.phases)
            if made > 1:
                self._metrics.tpot((last - first) / 1e9 / (made - 1))


async def _give_back(delivery: Delivery, exc: Retryable) -> None:
    """At once to whoever waits next, where a worker of another build may be among them: every other time only, as
    there may be none."""
    if isinstance(exc, NewerVersion) and delivery.num_delivered % 2:
        await delivery.nak()
    else:
        await delivery.nak_for_now()


def _check_subject(job: Job, where: subjects.JobSubject) -> None:
    """A job must say of itself what its subject says: the subject is what permissions are given for."""
    said = (job.model, job.priority, job.tenant, job.request)
    if said != (where.model, where.priority, where.tenant, where.request):
        raise NotDecodable("the job's request, tenant, model or priority differs from its subject's")
