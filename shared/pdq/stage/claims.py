"""What a worker may do with a job, decided from the request's newest state. Pure.

Claims fence only their own stage. Once a request is routed, its tokens and its normal end belong to the
newest decode claim; a prefill owner may end a request only while no decode claim stands; a cancel or a
deadline always may.

Under decode-first the prefill is delegated: its claim stands beside that of decode, whose the request is. It writes
`prefilled`, or `local` where it cannot, and never an end. It is dropped once the request is `local` or has ended.
"""

from __future__ import annotations

import msgspec

from pdq.log import Entry, follow
from pdq.messages import ErrorInfo, StageClaims, StageName, State


class Drop(msgspec.Struct, frozen=True):
    """There is nothing to do: acknowledge the job and forget it."""

    reason: str


class End(msgspec.Struct, frozen=True):
    """The request ends here, as this terminal record says."""

    state: State


class GiveUp(msgspec.Struct, frozen=True):
    """It was tried too often: a dead letter, and the request fails with this error."""

    error: ErrorInfo
    trace: str


class Resend(msgspec.Struct, frozen=True):
    """Prefill was done by an earlier claim: only its handoff may be missing."""

    state: State


class Claim(msgspec.Struct, frozen=True):
    """The stage is ours once this record is stored."""

    state: State


Verdict = Drop | End | GiveUp | Resend | Claim


def of_stage(state: State, stage: StageName) -> StageClaims:
    return state.prefill if stage == "prefill" else state.decode


def with_stage(state: State, stage: StageName, claims: StageClaims) -> State:
    if stage == "prefill":
        return msgspec.structs.replace(state, prefill=claims)
    return msgspec.structs.replace(state, decode=claims)


def judge(newest: Entry | None, stage: StageName, worker: str, now: float, max_attempts: int) -> Verdict:
    """What to do with a job that was just delivered. `now`: Unix seconds."""
    if newest is None:
        return Drop("no state: purged, or too old")
    state = newest.state
    if state.ended:
        return Drop(f"already {state.event}")
    if stage == "prefill" and delegated(state):
        if reason := _decode_needs_none(state, now):
            return Drop(reason)
        return _claim(state, stage, worker, max_attempts)
    if state.event == "cancelling":
        return End(follow(state, "cancelled", cause=state.cause))
    if state.deadline and now >= state.deadline:
        return End(expired(state, f"waiting for {stage}"))
    if stage == "prefill" and (state.promise is not None or state.decode.attempt):
        return Drop("decode has it") if state.decode.attempt else Resend(state)
    return _claim(state, stage, worker, max_attempts)


def delegated(state: State) -> bool:
    """Whether a prefill of this request is one that decode waits for."""
    return state.order == "decode-first"


def _decode_needs_none(state: State, now: float) -> str:
    """Why a delegated prefill is of no use any more; empty when it is."""
    if state.local:
        return f"decode computes it: {state.local}"
    if state.promise is not None:
        return "already prefilled"
    if state.event == "cancelling" or (state.deadline and now >= state.deadline):
        return "decode ends it"
    return ""


def _claim(state: State, stage: StageName, worker: str, max_attempts: int) -> Verdict:
    before = of_stage(state, stage)
    # An owner still named here neither finished nor released: it died, or lost its claim.
    failures = before.failures + (1 if before.owner else 0)
    if failures >= max_attempts:
        message = f"{stage} failed {failures} times; the last owner was {before.owner or 'released'}"
        return GiveUp(ErrorInfo(code="too_many_attempts", message=message), state.trace)
    claims = StageClaims(attempt=before.attempt + 1, owner=worker, failures=failures)
    return Claim(with_stage(follow(state, "claim", stage=stage, worker=worker), stage, claims))


def owns(newest: Entry | None, stage: StageName, attempt: int) -> str:
    """Whether an attempt may still write: empty if so, else why not (`ended` or `fenced`)."""
    if newest is None or newest.state.ended:
        return "ended"
    if stage == "prefill" and newest.state.local:
        return "ended"
    claims = of_stage(newest.state, stage)
    return "" if claims.attempt == attempt and claims.owner else "fenced"


def failed(state: State, error: ErrorInfo) -> State:
    return follow(state, "failed", error=error)


def left(state: State, worker: str, error: ErrorInfo) -> State:
    """A delegated prefill is given up: decode computes the prompt itself."""
    done = msgspec.structs.replace(state.prefill, owner="")
    return follow(
        state, "local", stage="prefill", worker=worker, cause=error.code, local="prefill_failed", prefill=done
    )


def expired(state: State, where: str) -> State:
    error = ErrorInfo(code="deadline_exceeded", message=f"the deadline passed while {where}")
    return follow(state, "expired", error=error)
