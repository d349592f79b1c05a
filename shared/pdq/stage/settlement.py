"""The settlement table: what becomes of a request and of its message, for everything that can happen.

| what happened                | the request                                  | the message      |
|------------------------------|----------------------------------------------|------------------|
| prefill done (Handoff)       | `prefilled`, then the decode job is published| ack              |
| ... delegated by decode      | `prefilled`: decode waits for it             | ack              |
| answer done (Answer)         | tokens stored, then `finished`               | ack              |
| Rejected                     | `failed` with its code, dead letter          | term             |
| not decodable                | `failed`, dead letter                        | term             |
| cancelled, expired           | tokens stored, then `cancelled` or `expired` | ack              |
| fenced (a newer claim)       | nothing: it is another's                     | left to its owner|
| ended meanwhile              | nothing                                      | ack              |
| stopping (drain)             | `released` (`drain`)                         | nak at once      |
| anything else                | `released` (`error`)                         | nak with backoff |
| ... for the last time        | `failed` (the last error), dead letter       | term             |
| a newer version met          | nothing: a newer build goes on               | nak, then later  |

A prefill that decode has delegated never ends its request: where this table says `failed` it writes `local`, and where
it says `cancelled` or `expired` it writes nothing, as decode does.

The next message is published, with a deterministic id, before the current one is acknowledged; a publish
that finds its message there already is a success. So whatever dies in between, the redelivery finds what
is done and does the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec

from pdq.bus import Bus
from pdq.errors import Interrupted, NewerVersion, PdqError, Rejected
from pdq.log import Entry, RequestLog, follow
from pdq.messages import ErrorInfo, Job, PrefillJob, Promise, StageName, State
from pdq.stage import claims
from pdq.stage.attempt import Answer, Handoff, Outcome
from pdq.stage.jobs import handoff_of, publish_job
from pdq.stage.unclaimed import Unclaimed
from pdq.stage.work import ClaimedJob
from pdq.telemetry import Metrics

log = logging.getLogger("pdq.stage")

BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0


class Settlement:
    """Settles the jobs of one stage of one worker."""

    def __init__(
        self, bus: Bus, request_log: RequestLog, metrics: Metrics, stage: StageName, worker: str, max_attempts: int
    ) -> None:
        self._bus = bus
        self._log = request_log
        self._metrics = metrics
        self._stage = stage
        self._worker = worker
        self._max_attempts = max_attempts
        self.unclaimed = Unclaimed(bus, request_log, metrics, stage, worker)

    async def settle(self, work: ClaimedJob, result: Outcome | Exception) -> None:
        """Apply the table. Raises Unavailable when the broker does not take it: the redelivery tries again."""
        try:
            await self._apply(work, result)
        except Interrupted as lost:
            # Found while writing: the request ended, or another worker owns the stage now.
            await self._apply(work, lost)

    async def _apply(self, work: ClaimedJob, result: Outcome | Exception) -> None:
        match result:
            case Handoff():
                await self._hand_off(work, result)
            case Answer():
                await self._finish(work, result)
            case NewerVersion():
                raise result
            case Rejected():
                await self._fail(work, ErrorInfo(code=result.code, message=str(result), param=result.param))
            case Interrupted(cause="cancelled" | "expired" as cause) if self._delegated(work.state):
                work.span.end(cause)
                self._note(work, f"{cause} elsewhere")
                await work.delivery.ack()
            case Interrupted(cause="cancelled" | "expired" as cause):
                await self._stop(work, cause)
            case Interrupted(cause="fenced"):
                work.span.end("fenced")
                self._note(work, "fenced")
            case Interrupted(cause="ended"):
                work.span.end("ended")
                self._note(work, "ended elsewhere")
                await work.delivery.ack()
                if work.writer is not None:
                    work.writer.close()
                await self.unclaimed.erase_purged(work.job.tenant, work.job.request)
            case Interrupted(cause="drain"):
                work.span.end("drain")
                await self._release(work, "drain")
                await work.delivery.nak()
            case _:
                await self._retry(work, result)

    # ---- rows of the table

    async def _hand_off(self, work: ClaimedJob, outcome: Handoff) -> None:
        timings = work.timings_ms(outcome)

        def prefilled(state: State) -> State:
            done = msgspec.structs.replace(state.prefill, owner="")
            return follow(state, "prefilled", promise=outcome.promise, prefill=done, timings_ms=timings)

        entry = await self._write(work, prefilled)
        if entry.state.ended:
            await self._ended(work, entry)
            return
        published_s = time.time()
        if not isinstance(work.job, PrefillJob) or work.job.handoff:
            await self.publish_handoff(work.job, outcome.promise, entry, work.span.headers())
        # As of the publish: what follows runs while the next stage does.
        work.span.end(at_s=published_s)
        self._metrics.handoff(outcome.promise.cause)
        self._note(work, "prefilled", promised_tokens=outcome.promise.tokens)
        await work.delivery.ack()

    async def _finish(self, work: ClaimedJob, outcome: Answer) -> None:
        await self._flush(work)
        fields = work.output_fields() | {
            "finish_reason": outcome.finish_reason,
            "kv": outcome.kv,
            "timings_ms": work.timings_ms(outcome),
        }
        await self._ended(work, await self._write(work, lambda state: follow(state, "finished", **fields)))

    async def _fail(self, work: ClaimedJob, error: ErrorInfo) -> None:
        work.span.fail(error.code, error.message)
        await self._flush(work)
        # First, because a redelivery that finds the request ended just drops the message.
        await self.unclaimed.bury(work.delivery, work.job.request, error, attempts=work.attempt, trace=work.state.trace)
        if self._delegated(work.state):
            await self._leave(work, error)
            return
        fields = work.output_fields()
        entry = await self._write(work, lambda state: msgspec.structs.replace(claims.failed(state, error), **fields))
        await self._ended(work, entry, term=error.code)

    async def _leave(self, work: ClaimedJob, error: ErrorInfo) -> None:
        """A delegated prefill fails: decode computes the prompt itself."""
        await self._write(work, lambda state: claims.left(state, self._worker, error))
        self._metrics.fell_back("prefill_failed")
        self._note(work, "left to decode", code=error.code)
        await work.delivery.term(error.code)

    async def _stop(self, work: ClaimedJob, cause: str) -> None:
        await self._flush(work)
        fields = work.output_fields()

        def stopped(state: State) -> State:
            if cause == "expired":
                return msgspec.structs.replace(claims.expired(state, f"in {self._stage}"), **fields)
            return follow(state, "cancelled", cause=state.cause, **fields)

        await self._ended(work, await self._write(work, stopped))

    async def _retry(self, work: ClaimedJob, exc: Outcome | Exception) -> None:
        error = ErrorInfo(code=exc.code if isinstance(exc, PdqError) else "internal_error", message=_told(exc))
        failures = claims.of_stage(work.state, self._stage).failures + 1
        if failures >= self._max_attempts:
            await self._fail(work, error)
            return
        work.span.fail(error.code, error.message)
        await self._release(work, "error")
        delay = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (failures - 1))
        self._note(work, "to be retried", code=error.code, in_s=delay)
        await work.delivery.nak(delay)

    # ---- steps they share

    async def _release(self, work: ClaimedJob, cause: str) -> None:
        def released(state: State) -> State:
            mine = claims.of_stage(state, self._stage)
            failures = mine.failures + (0 if cause == "drain" else 1)
            free = msgspec.structs.replace(mine, owner="", failures=failures)
            record = follow(state, "released", stage=self._stage, worker=self._worker, cause=cause)
            return claims.with_stage(record, self._stage, free)

        await self._write(work, released)

    async def _write(self, work: ClaimedJob, change: Callable[[State], State]) -> Entry:
        """Append what `change` makes of the newest state, if we still may. A cancel that came first wins.

        Raises Interrupted (`ended` or `fenced`) when we may not.
        """

        def next_state(newest: Entry | None) -> State:
            lost = claims.owns(newest, self._stage, work.attempt)
            if lost or newest is None:
                raise Interrupted(lost or "ended")
            if newest.state.submit_seq != work.state.submit_seq:
                # Ours was purged, and its name used again.
                raise Interrupted("ended")
            if newest.state.event == "cancelling":
                if self._delegated(newest.state):
                    raise Interrupted("cancelled")
                return follow(newest.state, "cancelled", cause=newest.state.cause, **work.output_fields())
            state = change(newest.state)
            if state.ended and self._stage == "prefill" and newest.state.decode.attempt:
                raise Interrupted("fenced")
            return state

        entry = await self._log.update(work.job.tenant, work.job.request, next_state, known=work.entry)
        assert entry is not None
        return entry

    def _delegated(self, state: State) -> bool:
        """Whether this is a prefill that decode waits for, whose the request is."""
        return self._stage == "prefill" and claims.delegated(state)

    async def _ended(self, work: ClaimedJob, entry: Entry, *, term: str = "") -> None:
        state = entry.state
        self.unclaimed.count_end(state)
        if state.kv is not None:
            self._metrics.kv(state.kv.promised_tokens, state.kv.loaded_tokens, state.kv.local_tokens, state.kv.cause)
        if state.usage is not None:
            work.span.set_usage(state.usage, state.finish_reason or state.event, state.kv)
        # As of the end's own time: what follows is housekeeping, and its reader may be done before us.
        work.span.end(state.event, at_s=state.at)
        self._note(work, state.event)
        if term:
            await work.delivery.term(term)
        else:
            await work.delivery.ack()
        await self.unclaimed.tidy(work.job.tenant, work.job.request, delegated=work.delegated)

    async def _flush(self, work: ClaimedJob) -> None:
        if work.writer is not None:
            await work.writer.flush()

    def _note(self, work: ClaimedJob, outcome: str, **more: str | int | float) -> None:
        fields = {"action": f"{self._stage}.{outcome.split()[0]}", "request_id": work.job.request, **more}
        log.info("%s %s", self._stage, outcome, extra={**fields, "attempt": work.attempt})

    async def publish_handoff(self, job: Job, promise: Promise, known: Entry, headers: dict[str, str]) -> None:
        """Publish the decode job of a prefilled request; that it is queued already is success."""
        await publish_job(self._bus, handoff_of(job, promise), known, headers)


def _told(exc: Outcome | Exception) -> str:
    """An error for people. Only our own errors' texts are shown: others may quote what they were given."""
    return str(exc) if isinstance(exc, PdqError) else f"unexpected {type(exc).__name__}"
