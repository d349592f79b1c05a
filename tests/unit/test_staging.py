"""Which waiting prompts a busy decode worker stages."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from pdq.bus import Stored
from pdq.log import first
from pdq.messages import Promise, encode_json
from pdq.stage import staging
from pdq.stage.staging import MOST_WAITING, Staging, chosen
from pdq.telemetry import Metrics

WORKERS = ["d1", "d2", "d3"]
BYTES = 1_000


def test_one_worker_stages_a_request_whoever_asks() -> None:
    names = [("t", f"r-{number}") for number in range(300)]
    shares = Counter(chosen(name, "", WORKERS) for name in names)
    assert [chosen(name, "", WORKERS) for name in names] == [chosen(name, "", WORKERS[::-1]) for name in names]
    assert set(shares) == set(WORKERS) and min(shares.values()) > 60
    # A worker that leaves takes nothing away from the others.
    kept = [name for name in names if chosen(name, "", WORKERS) != "d3"]
    assert all(chosen(name, "", WORKERS) == chosen(name, "", WORKERS[:2]) for name in kept)


def test_the_preferred_worker_stages_it_if_it_lives() -> None:
    assert all(chosen(("t", f"r{number}"), "d2", WORKERS) == "d2" for number in range(9))
    assert chosen(("t", "r"), "gone", WORKERS) == chosen(("t", "r"), "", WORKERS)
    assert chosen(("t", "r"), "", []) == ""


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["m"])


def stager(metrics: Metrics, full: bool = True, room_bytes: int = 100 * BYTES) -> Staging:
    never: Any = None  # nothing here asks the broker
    return Staging(
        never,
        never,
        metrics,
        "d1",
        model="m",
        contract="c",
        full=lambda: full,
        stage=never,
        room_bytes=room_bytes,
    )


def record(request: str, event: Any = "prefilled", **fields: Any) -> Stored:
    promise = Promise(tokens=10, bytes=BYTES, contract="c")
    state = first(event, **{"model": "m", "order": "prefill-first", "promise": promise, **fields})
    return Stored(f"pdq.live.t.{request}.state", 1, encode_json(state), {})


def waiting(stager: Staging) -> list[str]:
    return [request for _, request in stager._waiting]


@pytest.mark.parametrize(
    "other",
    [
        {"event": "claim", "stage": "prefill"},
        {"order": "decode-first"},
        {"model": "n"},
        {"promise": None},
        {"promise": Promise(cause="store_late", contract="c")},
        {"promise": Promise(tokens=10, bytes=BYTES, contract="another")},
        {"promise": Promise(tokens=10, bytes=101 * BYTES, contract="c")},
    ],
)
def test_only_kv_that_waits_and_is_of_use_here_is_staged(metrics: Metrics, other: dict[str, Any]) -> None:
    busy, idle = stager(metrics), stager(metrics, full=False)
    for each in (busy, idle):
        each.hear(record("r1"))
        each.hear(record("r2", **other))
        each.hear(Stored("pdq.live.t.r3.state", 1, b"no state", {}))
    assert (waiting(busy), waiting(idle)) == (["r1"], [])


def test_a_few_at_a_time_and_no_more_than_has_room(metrics: Metrics) -> None:
    many, narrow = stager(metrics), stager(metrics, room_bytes=2 * BYTES)
    for number in range(9):
        many.hear(record(f"r{number}"))
        narrow.hear(record(f"r{number}"))
    assert len(waiting(many)) == MOST_WAITING
    assert waiting(narrow) == ["r0", "r1"]


@pytest.mark.parametrize("event", ["claim", "finished", "failed", "cancelled", "expired"])
def test_what_waits_no_more_is_left_out(metrics: Metrics, event: str) -> None:
    one = stager(metrics)
    one.hear(record("r1"))
    one.hear(record("r1", event, stage="decode"))
    assert waiting(one) == []


def test_what_was_staged_is_counted_as_used_or_lost(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stager(metrics, room_bytes=2 * BYTES)
    for request in ("used", "taken"):
        one._remember(("t", request), staging.Staged(10, BYTES, 0.1, time.monotonic()))
    one.hear(record("waits"))
    assert waiting(one) == [], "no room"
    one.hear(record("used", "claim", stage="decode", worker="d1"))
    one.hear(record("taken", "claim", stage="decode", worker="d2"))
    found = one.taken("t", "used")
    assert found is not None and found.tokens == 10
    assert one.taken("t", "used") is one.taken("t", "taken") is None
    one.hear(record("waits"))
    assert waiting(one) == ["waits"]
    one._remember(("t", "old"), staging.Staged(5, 2 * BYTES, 0.1, time.monotonic()))
    monkeypatch.setattr(staging, "FORGET_S", 0.0)
    one.hear(record("later"))
    assert waiting(one) == ["waits", "later"], "what nobody heard of for long is forgotten"
    text = metrics.text().decode()
    assert 'pdq_kv_staged_tokens_total{result="used"} 10.0' in text
    assert 'pdq_kv_staged_tokens_total{result="lost"} 15.0' in text
