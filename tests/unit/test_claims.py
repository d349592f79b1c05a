"""What a worker may do with a job: the table of verdicts."""

from __future__ import annotations

import pytest
from pdq.log import Entry, first, follow
from pdq.messages import ErrorInfo, Promise, StageClaims, State
from pdq.stage import claims
from pdq.stage.claims import Claim, Drop, End, GiveUp, Resend, judge, owns

NOW = 1_000.0


def routed(**fields: object) -> State:
    return follow(first("accepted", deadline=NOW + 60), "routed", **fields)


def verdict(state: State | None, stage: str = "decode", now: float = NOW) -> claims.Verdict:
    entry = None if state is None else Entry(7, state)
    return judge(entry, stage, "me", now, max_attempts=3)  # type: ignore[arg-type]


def test_no_state_counts_as_ended() -> None:
    assert isinstance(verdict(None), Drop)


@pytest.mark.parametrize("event", ["finished", "failed", "cancelled", "expired"])
def test_an_ended_request_is_dropped(event: str) -> None:
    assert verdict(follow(routed(), event)) == Drop(f"already {event}")  # type: ignore[arg-type]


def test_a_claimer_that_finds_a_cancel_ends_it() -> None:
    found = verdict(follow(routed(), "cancelling", cause="client"))
    assert isinstance(found, End) and found.state.event == "cancelled" and found.state.cause == "client"


def test_a_passed_deadline_ends_it_unseen() -> None:
    found = verdict(routed(), now=NOW + 60)
    assert isinstance(found, End) and found.state.event == "expired"
    assert found.state.error is not None and found.state.error.code == "deadline_exceeded"


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_first_claim(stage: str) -> None:
    found = verdict(routed(), stage)
    assert isinstance(found, Claim)
    mine = claims.of_stage(found.state, stage)  # type: ignore[arg-type]
    assert (mine.attempt, mine.owner, mine.failures) == (1, "me", 0)
    assert found.state.event == "claim" and found.state.stage == stage


def test_an_owner_that_neither_finished_nor_released_counts_as_a_failure() -> None:
    found = verdict(routed(decode=StageClaims(attempt=1, owner="dead", failures=0)))
    assert isinstance(found, Claim)
    assert (found.state.decode.attempt, found.state.decode.failures) == (2, 1)


def test_a_release_by_drain_is_no_failure() -> None:
    found = verdict(routed(decode=StageClaims(attempt=5, owner="", failures=0)))
    assert isinstance(found, Claim)
    assert (found.state.decode.attempt, found.state.decode.failures) == (6, 0)


def test_too_many_failures_end_as_a_dead_letter() -> None:
    found = verdict(routed(decode=StageClaims(attempt=3, owner="dead", failures=2)))
    assert isinstance(found, GiveUp) and found.error.code == "too_many_attempts"
    assert "dead" in found.error.message


def test_a_prefilled_job_only_resends_its_handoff() -> None:
    state = follow(routed(), "prefilled", promise=Promise(tokens=32), prefill=StageClaims(attempt=1))
    assert verdict(state, "prefill") == Resend(state)


def test_a_prefill_job_that_decode_has_is_dropped() -> None:
    state = routed(promise=Promise(tokens=32), decode=StageClaims(attempt=1, owner="d"))
    assert isinstance(verdict(state, "prefill"), Drop)


def test_claims_fence_only_their_own_stage() -> None:
    state = routed(prefill=StageClaims(attempt=2, owner="p"), decode=StageClaims(attempt=1, owner="d"))
    entry = Entry(9, state)
    assert owns(entry, "prefill", 2) == ""
    assert owns(entry, "prefill", 1) == "fenced"
    assert owns(entry, "decode", 1) == ""
    assert owns(Entry(9, follow(state, "finished")), "decode", 1) == "ended"
    assert owns(None, "decode", 1) == "ended"


# ---- decode-first: a prefill that decode has delegated


def waiting(**fields: object) -> State:
    """Decode has claimed a decode-first request, and waits for its prefill."""
    claimed = {"order": "decode-first", "decode": StageClaims(attempt=1, owner="d"), **fields}
    return follow(routed(), "claim", stage="decode", **claimed)


def test_a_delegated_prefill_is_claimed_beside_decode() -> None:
    found = verdict(waiting(), "prefill")
    assert isinstance(found, Claim)
    assert (found.state.prefill.owner, found.state.decode.owner) == ("me", "d")
    again = verdict(waiting(prefill=StageClaims(attempt=1, owner="dead")), "prefill")
    assert isinstance(again, Claim) and (again.state.prefill.attempt, again.state.prefill.failures) == (2, 1)


def test_a_delegated_prefill_is_claimed_while_decode_changes_hands() -> None:
    assert isinstance(verdict(waiting(decode=StageClaims(attempt=1)), "prefill"), Claim)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (waiting(local="late"), "decode computes it: late"),
        (waiting(promise=Promise(tokens=32)), "already prefilled"),
        (waiting(promise=Promise(cause="store_failed")), "already prefilled"),
        (follow(waiting(), "cancelling", cause="client"), "decode ends it"),
        (waiting(deadline=NOW), "decode ends it"),
        (follow(waiting(), "finished"), "already finished"),
    ],
)
def test_a_delegated_prefill_that_is_of_no_use_is_dropped(state: State, reason: str) -> None:
    assert verdict(state, "prefill") == Drop(reason)


def test_a_decode_claim_after_local_or_prefilled_goes_on() -> None:
    for state in (waiting(local="late"), waiting(promise=Promise(tokens=32)), waiting()):
        found = verdict(state, "decode")
        assert isinstance(found, Claim)
        assert (found.state.decode.attempt, found.state.local, found.state.promise) == (2, state.local, state.promise)


def test_too_many_attempts_of_a_delegated_prefill_are_given_up() -> None:
    assert isinstance(verdict(waiting(prefill=StageClaims(attempt=3, owner="dead", failures=2)), "prefill"), GiveUp)


def test_local_takes_the_stage_from_prefill_and_from_nobody_else() -> None:
    state = waiting(local="late", prefill=StageClaims(attempt=1, owner="p"))
    assert owns(Entry(9, state), "prefill", 1) == "ended"
    assert owns(Entry(9, state), "decode", 1) == ""
    assert owns(Entry(9, waiting(prefill=StageClaims(attempt=1, owner="p"))), "prefill", 1) == ""


def test_a_prefill_that_fails_is_left_to_decode() -> None:
    state = claims.left(waiting(prefill=StageClaims(attempt=3, owner="p")), "p", ErrorInfo(code="broken", message="m"))
    assert (state.event, state.local, state.cause, state.ended) == ("local", "prefill_failed", "broken", False)
    assert (state.prefill.owner, state.decode.owner) == ("", "d")


def test_follow_keeps_the_register_and_forgets_what_was_said_of_one_event() -> None:
    state = follow(routed(order="prefill-first"), "released", stage="decode", worker="w", cause="drain")
    after = follow(state, "claim", stage="decode")
    assert (after.order, after.cause, after.worker) == ("prefill-first", "", "")
    assert after.nonce != state.nonce
