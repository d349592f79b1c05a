"""Routing: from a submit message to `accepted`, `routed` and a queued job, or to one `failed` event.

Everything follows from the message (its body, headers, sequence and stored time), so a message that is
delivered again, to this router or another, is routed to the same job.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from pdq import subjects
from pdq.bus import Bus, Delivery
from pdq.errors import QueueFull, Rejected, Retryable
from pdq.log import UNREAD, Entry, Known, RequestLog, erase, first, follow
from pdq.messages import (
    AskedOrder,
    DecodeJob,
    ErrorInfo,
    Job,
    Lane,
    PrefillJob,
    Priority,
    StageName,
    State,
    StateEvent,
    pack_ids,
)
from pdq.settings import LimitSettings, Models, RouterSettings
from pdq.stage.dead import DeadLetters
from pdq.stage.jobs import publish_job
from pdq.stage.run import Run
from pdq.telemetry import Metrics, StageSpan, Telemetry

from pdq_router import prepare
from pdq_router.admission import Admission, Overloaded
from pdq_router.order import Decision, OrderInputs, decide
from pdq_router.prefixes import Prefixes, positions
from pdq_router.shares import Shares
from pdq_router.timers import Timers
from pdq_router.tokens import INLINE_BYTES, Tokenizer
from pdq_router.workers import Workers

log = logging.getLogger("pdq.router")

BURIED = frozenset({"invalid_json", "too_many_deliveries"})
"""Failures that operators are told of."""
TOO_LATE = "deadline_exceeded"


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """A submit message, as far as its subject and headers tell."""

    request: str
    numbered: str
    """The name by its sequence, which is never another's."""
    tenant: str
    model: str
    seq: int
    stored_s: float
    body: bytes
    deadline: float = 0.0
    priority: Priority = "normal"
    order: AskedOrder | None = None
    replay_of: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


class Router:
    """`process` is what the worker loop calls for each submit message."""

    def __init__(
        self,
        bus: Bus,
        telemetry: Telemetry,
        metrics: Metrics,
        settings: RouterSettings,
        limits: LimitSettings,
        models: Models,
        tokenizers: Mapping[str, Tokenizer],
        admission: Admission,
        shares: Shares,
        prefixes: Prefixes,
        worker: str,
    ) -> None:
        self._bus = bus
        self._telemetry = telemetry
        self._metrics = metrics
        self._settings = settings
        self._limits = limits
        self._models = models
        self._tokenizers = tokenizers
        self._worker = worker
        self._log = RequestLog(bus)
        self._timers = Timers(bus)
        self._workers = Workers(bus)
        self._admission = admission
        self._shares = shares
        self._prefixes = prefixes
        self._dead = DeadLetters(bus, metrics, worker)

    async def process(self, delivery: Delivery, run: Run) -> None:
        submit, refused = self._read(delivery)
        if delivery.num_delivered > 1:
            self._metrics.redelivered("route")
        with self._telemetry.process(
            "route",
            delivery.stream,
            delivery.headers,
            request=submit.request,
            tenant=submit.tenant,
            model=submit.model,
            worker=self._worker,
            stored_ns=delivery.stored_ns,
            message_id=str(delivery.seq),
            deliveries=delivery.num_delivered,
        ) as span:
            try:
                await self._process(delivery, submit, refused, span)
            except Retryable as exc:
                log.warning("route: %s", exc, extra={"request_id": submit.request})
                span.fail(exc.code, str(exc))
                self._metrics.gave_back("route", exc.code)
                await delivery.nak_for_now()

    def _read(self, delivery: Delivery) -> tuple[Submit, Rejected | None]:
        """The submit, and what is wrong with its headers. A bad name fails under the sequence's name."""
        where = subjects.parse_submit(delivery.subject)
        numbered = prepare.sequence_id(delivery.headers, delivery.seq)
        known: dict[str, Any] = {
            "request": numbered,
            "numbered": numbered,
            "tenant": where.tenant,
            "model": where.model,
            "seq": delivery.seq,
            "stored_s": delivery.stored_s,
            "body": delivery.data,
        }
        limits, settings = self._limits, self._settings
        try:
            known["request"] = prepare.request_id(delivery.headers, delivery.seq)
            lasts = prepare.deadline_s(
                delivery.headers, default_s=settings.default_deadline_s, max_s=limits.max_deadline_s
            )
            known["deadline"] = prepare.began_s(delivery.headers, delivery.stored_s) + lasts
            known["priority"] = prepare.priority(delivery.headers)
            known["order"] = prepare.requested_order(delivery.headers)
            known["replay_of"] = prepare.replay_of(delivery.headers)
            prepare.check_arrived(delivery.headers)
        except Rejected as exc:
            return Submit(**known), exc
        return Submit(**known), None

    async def _process(self, delivery: Delivery, submit: Submit, refused: Rejected | None, span: StageSpan) -> None:
        began_s = time.time()
        # A name that was never seen is accepted by one write; a second delivery reads what is there first.
        accepted = await self._accept(submit, span, known=None if delivery.num_delivered == 1 else UNREAD)
        if accepted is None:
            await self._duplicate(submit, span)
        elif accepted.state.submit_seq != submit.seq or accepted.state.ended:
            log.info("submit dropped: known already", extra={"request_id": submit.request})
            span.end("dropped")
        else:
            try:
                if refused is not None:
                    raise refused
                if accepted.state.at < began_s:
                    self._check_deliveries(delivery, accepted.state)
                self._check_deadline(submit, accepted.state)
                await self._route(submit, accepted, delivery, span)
            except Rejected as exc:
                if exc.code in BURIED:
                    await self._bury(delivery, submit, exc)
                await self._fail(submit, exc, span)
        await delivery.ack()

    def _check_deliveries(self, delivery: Delivery, state: State) -> None:
        """Raise Rejected for a submit that was accepted before, and never got further: it may kill its routers."""
        before = delivery.num_delivered - 1
        if before >= self._limits.max_deliver and state.event == "accepted":
            message = f"the submit was delivered {before} times before, and never routed"
            raise Rejected(message, code="too_many_deliveries")

    def _check_deadline(self, submit: Submit, state: State) -> None:
        """Raise Rejected for a submit that was too late when it was accepted: it had waited at its site, or for a
        router."""
        if submit.deadline <= state.at:
            raise Rejected("the deadline passed before the request was routed", code=TOO_LATE)

    async def _accept(self, submit: Submit, span: StageSpan, *, known: Known = UNREAD) -> Entry | None:
        """Store `accepted`, once for an id. None: the id belongs to another body."""

        def change(newest: Entry | None) -> State | None:
            if newest is not None:
                return None
            return first(
                "accepted",
                submit_seq=submit.seq,
                submitted=submit.stored_s,
                digest=submit.digest,
                trace=span.trace_id,
                replay_of=submit.replay_of,
                model=submit.model,
                priority=submit.priority,
                deadline=submit.deadline,
            )

        entry = await self._log.update(submit.tenant, submit.request, change, known=known)
        assert entry is not None
        # Without a digest it is the end of a request that was cancelled before any router saw it.
        same = entry.state.submit_seq == submit.seq or entry.state.digest in ("", submit.digest)
        return entry if same else None

    async def _duplicate(self, submit: Submit, span: StageSpan) -> None:
        """Another body under an id that is taken: it fails under its sequence's name."""
        own = msgspec.structs.replace(submit, request=submit.numbered)
        message = f"Pdq-Request {submit.request} was used for another body already"
        entry = await self._accept(own, span)
        if entry is not None and not entry.state.ended:
            await self._fail(own, Rejected(message, code="duplicate_id", param="Pdq-Request"), span)

    async def _route(self, submit: Submit, accepted: Entry, delivery: Delivery, span: StageSpan) -> None:
        began = time.perf_counter()
        prepared = await self._prepare(submit)
        span.set_sampling(prepared.sampling)
        spec = prepared.spec
        names = positions(spec.slug, submit.tenant, prepared.prompt, spec.chunk_tokens)
        likely = self._prefixes.likely(names, spec.chunk_tokens)
        decision = await self._decide(submit, prepared, likely.cached_tokens)
        lane: Lane = submit.priority
        if accepted.state.event == "accepted":
            lane = await self._admit(submit, prepared, decision)
        timings = {
            "route_queue": round(span.queue_wait_s * 1e3, 3),
            "route": round((time.perf_counter() - began) * 1e3, 3),
        }

        def routed(newest: Entry | None) -> State | None:
            if newest is None or newest.state.event not in ("accepted", "cancelling"):
                return None
            if newest.state.event == "cancelling":
                return follow(newest.state, "cancelled", cause=newest.state.cause)
            return follow(
                newest.state,
                "routed",
                model=spec.slug,
                order=decision.order,
                reason=decision.reason,
                inputs=decision.inputs,
                prompt_tokens=len(prepared.prompt),
                max_tokens=prepared.sampling.max_tokens,
                lane="" if lane == submit.priority else lane,
                prefix=names[-1] if names else "",
                prefer=likely.worker,
                timings_ms=timings,
            )

        # Both before the job: what is queued has a timer, whatever dies in between.
        entry, _ = await asyncio.gather(
            self._log.update(submit.tenant, submit.request, routed, known=accepted),
            self._timers.set(submit.tenant, submit.request, submit.deadline),
        )
        # A second delivery after `routed` publishes the job of the order that stands in the log.
        if entry is not None and entry.state.event == "routed":
            self._prefixes.routed(names)
            if entry.state.prefer:
                span.set(prefer=entry.state.prefer)
            job = _job(submit, prepared, entry.state, decision)
            await self._queue(submit, entry, job, span)

    async def _admit(self, submit: Submit, prepared: prepare.Prepared, decision: Decision) -> Lane:
        """Where the job waits. Raises Overloaded where the queue or the tenant has no room, and Rejected for what its
        tenant may never have."""
        stage: StageName = "prefill" if decision.order == "prefill-first" else "decode"
        model, tokens = prepared.spec.slug, len(prepared.prompt) + prepared.sampling.max_tokens
        lane = self._shares.admit(submit.tenant, submit.request, model=model, priority=submit.priority, tokens=tokens)
        try:
            await self._admission.check(stage, model, lane)
        except BaseException:
            self._shares.forget(submit.tenant, submit.request)
            raise
        return lane

    async def _decide(self, submit: Submit, prepared: prepare.Prepared, cached_tokens: int) -> Decision:
        settings = self._settings
        return decide(
            OrderInputs(
                requested=submit.order,
                default=settings.order,
                prompt_tokens=len(prepared.prompt),
                cached_tokens=cached_tokens,
                chunk_tokens=prepared.spec.chunk_tokens,
                handoff_s=settings.handoff_s,
                short_prompt_tokens=settings.short_prompt_tokens,
                prefill_wait_s=settings.prefill_wait_s,
                prefill_start_s=settings.prefill_start_s,
                **(await self._workers.stages(prepared.spec.slug))._asdict(),
            )
        )

    async def _prepare(self, submit: Submit) -> prepare.Prepared:
        def work() -> prepare.Prepared:
            return prepare.prepare(
                submit.body,
                subject_model=submit.model,
                request=submit.request,
                models=self._models,
                tokenizers=self._tokenizers,
                default_max_tokens=self._settings.default_max_tokens,
            )

        return await asyncio.to_thread(work) if len(submit.body) > INLINE_BYTES else work()

    async def _queue(self, submit: Submit, entry: Entry, job: Job, span: StageSpan) -> None:
        state = entry.state
        span.set(order=state.order, reason=state.reason, prompt_tokens=state.prompt_tokens)
        span.set(**{f"pdq.order.{name}": value for name, value in state.inputs.items()})
        published_s = time.time()
        try:
            await publish_job(self._bus, job, entry, span.headers())
        except QueueFull as exc:
            raise Overloaded(f"the queue is full: {exc}", code="queue_full", retry_after_s=exc.retry_after_s) from exc
        # As of the publish: what follows runs while the next stage does.
        span.end(at_s=published_s)
        self._metrics.routed(state.order, state.reason)
        if state.reason == "no_prefill_worker":
            self._metrics.fell_back("no_prefill_worker")
        self._metrics.queue_wait("route", span.queue_wait_s)
        self._metrics.stage("route", state.timings_ms.get("route", 0.0) / 1e3)
        fields = {"action": "route.routed", "request_id": submit.request, "order": state.order}
        log.info("routed", extra={**fields, "reason": state.reason, "prompt_tokens": state.prompt_tokens})

    async def _fail(self, submit: Submit, exc: Rejected, span: StageSpan) -> None:
        """End the request with one event: `failed`, or `expired` for one that came too late."""
        event: StateEvent = "expired" if exc.code == TOO_LATE else "failed"
        hint = exc.retry_after_s if isinstance(exc, Overloaded) else 0.0
        error = ErrorInfo(code=exc.code, message=str(exc), param=exc.param, retry_after_s=hint)
        span.fail(error.code, f"{error.code} {error.param or ''}".rstrip())

        def failing(newest: Entry | None) -> State | None:
            if newest is None or newest.state.ended:
                return None
            return follow(newest.state, event, error=error)

        entry = await self._log.update(submit.tenant, submit.request, failing)
        if entry is None:
            # It was purged meanwhile, and goes with the letter that it may have by now.
            await erase(self._bus, submit.tenant, submit.request)
        else:
            state = entry.state
            self._metrics.ended(state.model, state.order, state.event, state.lasted_s)
        await self._timers.stop(submit.tenant, submit.request)
        fields = {"action": "route.failed", "request_id": submit.request, "code": error.code}
        log.info("refused", extra={**fields, "param": error.param or ""})

    async def _bury(self, delivery: Delivery, submit: Submit, exc: Rejected) -> None:
        """A body that nobody can read goes to PDQ_DEAD: its sender may not be reading the log."""
        await self._dead.bury(
            "route",
            submit.tenant,
            submit.model,
            submit.request,
            ErrorInfo(code=exc.code, message=str(exc), param=exc.param),
            subject=delivery.subject,
            body=delivery.data,
            headers=delivery.headers,
            attempts=delivery.num_delivered,
        )


def _job(submit: Submit, prepared: prepare.Prepared, state: State, decision: Decision) -> Job:
    """The first job of the order that stands in the log."""
    common: dict[str, Any] = {
        "request": submit.request,
        "tenant": submit.tenant,
        "model": prepared.spec.slug,
        "priority": state.lane or submit.priority,
        "deadline": submit.deadline,
        "prompt": pack_ids(prepared.prompt),
        "sampling": prepared.sampling,
        "prefer": state.prefer,
    }
    if state.order == "prefill-first":
        return PrefillJob(**common)
    if state.order == "decode-first":
        return DecodeJob(**common, prefill_wait_s=decision.prefill_wait_s)
    return DecodeJob(**common)
