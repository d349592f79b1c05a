"""What `pdq explain` makes of a request's log."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
from pdq.cli.explaining import LOCALS, REASONS, explained, text
from pdq.log import first, follow
from pdq.messages import ErrorInfo, KvReport, LocalCause, OrderReason, Promise, StageClaims, State
from pdq_router.order import OrderInputs, StageInputs, decide


def log_of(*, local: bool = False, **inputs: object) -> list[State]:
    """A decode-first request that ended, with a second of time between its states."""
    decision = decide(OrderInputs(requested="decode-first", prompt_tokens=200, chunk_tokens=32, **inputs))  # type: ignore[arg-type]
    states = [first("accepted", submitted=100.0, deadline=1_000.0)]
    states.append(follow(states[-1], "routed", order=decision.order, reason=decision.reason, inputs=decision.inputs))
    states.append(follow(states[-1], "claim", stage="decode", worker="d", decode=StageClaims(attempt=1, owner="d")))
    if local:
        states.append(follow(states[-1], "local", stage="decode", worker="d", local="late"))
        states.append(follow(states[-1], "finished", finish_reason="stop", kv=KvReport()))
    else:
        promise = Promise(tokens=192, bytes=1)
        claims = StageClaims(attempt=2, failures=1)
        states.append(follow(states[-1], "prefilled", promise=promise, prefill=claims, timings_ms={"prefill": 7.5}))
        kv = KvReport(promised_tokens=192, loaded_tokens=160)
        states.append(follow(states[-1], "finished", finish_reason="length", kv=kv))
    return [msgspec.structs.replace(state, at=100.0 + place) for place, state in enumerate(states)]


def test_every_reason_and_every_cause_has_words() -> None:
    assert REASONS.keys() == set(get_args(OrderReason))
    assert LOCALS.keys() == set(get_args(LocalCause))


def test_what_is_told_of_a_request() -> None:
    stage = StageInputs(workers=1, prompt_tokens_s=1_000.0)
    moves = {"kv_bytes_per_token": 10, "store_bytes_s": 1e4, "load_bytes_s": 1e4, "handoff_s": 0.5}
    found = explained("r-1", log_of(prefill=stage, decode=stage, **moves))
    assert (found["order"], found["reason"], found["why"]) == ("decode-first", "requested", REASONS["requested"])
    assert found["estimates_ms"] == {"prefill-first": 1_084.0, "decode-first": 1_584.0, "decode-only": 200.0}
    assert found["inputs"]["prompt_tokens"] == 200 and not [n for n in found["inputs"] if n.startswith("estimate")]
    assert found["kv"] == {"promised_tokens": 192, "loaded_tokens": 160, "local_tokens": 0, "cause": ""}
    assert found["attempts"] == {"prefill": {"attempts": 2, "failures": 1}, "decode": {"attempts": 1, "failures": 0}}
    assert [event["event"] for event in found["events"]] == ["accepted", "routed", "claim", "prefilled", "finished"]
    assert [event["after_ms"] for event in found["events"]] == [0.0, 1e3, 2e3, 3e3, 4e3]
    assert found["events"][2] == {"event": "claim", "after_ms": 2e3, "stage": "decode", "worker": "d"}
    shown = text(found)
    for words in (
        "order     decode-first (requested): the request asked for it",
        "kv        160 of 192 promised tokens loaded",
        "attempts  prefill 2 (1 failed), decode 1",
        "prompt_tokens",
        "3,000.0  prefilled",
        "prefill  7.5",
    ):
        assert words in shown, shown
    assert re.search(r"^decode-first +1,584\.0$", shown, re.MULTILINE)


def test_a_prompt_that_decode_computed_itself() -> None:
    found = explained("r-1", log_of(local=True))
    assert (found["local"], found["local_why"], found["estimates_ms"]) == ("late", LOCALS["late"], None)
    assert found["kv"]["promised_tokens"] == 0
    assert "decode computed the prompt itself (late): the prefill had not come" in text(found)
    assert "estimated" not in text(found)


def test_kv_that_never_came_says_why() -> None:
    states = log_of()
    nothing = follow(states[-2], "prefilled", promise=Promise(cause="store_failed"))
    assert "0 of 0 promised tokens loaded (store_failed)" in text(explained("r-1", [*states[:-2], nothing]))


def test_a_request_that_was_refused_has_no_order() -> None:
    accepted = first("accepted", submitted=100.0)
    error = ErrorInfo(code="empty_prompt", message="messages is empty")
    shown = text(explained("r-1", [accepted, follow(accepted, "failed", error=error)]))
    assert "none was chosen" in shown and "empty_prompt: messages is empty" in shown and "kv" not in shown


def test_a_reason_of_a_newer_router_stands_for_itself() -> None:
    accepted = first("accepted", submitted=100.0)
    routed = follow(accepted, "routed", order="decode-only", reason="full_moon")
    assert "decode-only (full_moon): full_moon" in text(explained("r-1", [accepted, routed]))


def test_a_preference_says_what_became_of_it() -> None:
    accepted = first("accepted", submitted=100.0)
    routed = follow(accepted, "routed", order="decode-only", reason="cached", prefer="d1")
    shown = [
        text(
            explained(
                "r-1", [accepted, follow(routed, "claim", stage="decode", decode=StageClaims(attempt=1, owner=owner))]
            )
        )
        for owner in ("", "d1", "d2")
    ]
    assert "prefers   d1\n" in shown[0]
    assert "prefers   d1, which decoded it" in shown[1]
    assert "prefers   d1; decoded by d2" in shown[2]
    assert "prefers" not in text(explained("r-1", [accepted]))


def test_what_waited_behind_all_is_told_so() -> None:
    log = log_of()
    assert explained("r-1", log)["lane"] == "normal" and "share" not in text(explained("r-1", log))
    over = [msgspec.structs.replace(state, lane="excess") for state in log]
    found = explained("r-1", over)
    assert found["lane"] == "excess" and "its tenant's share was waiting already" in text(found)
