"""Which decode jobs a worker leaves to another."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pdq.bus import Delivery
from pdq.messages import DecodeJob, Sampling, WorkerBeat
from pdq.stage.preference import MOST_PASSES, YOUNG_S, Preference, Preferred, judge, passed_before
from pdq.telemetry import Metrics


def beat(busy: int, slots: int = 4) -> WorkerBeat:
    return WorkerBeat(worker="d1", stage="decode", model="m", slots=slots, busy=busy)


@pytest.mark.parametrize(
    ("prefer", "deliveries", "waited_s", "busy", "of_preferred", "expected"),
    [
        ("", 1, 0.0, 0, beat(0), "none"),
        ("d2", 1, 0.0, 0, None, "kept"),
        ("d2", 9, 9.0, 3, None, "kept"),
        ("d1", 1, 0.0, 0, beat(0), "passed"),
        ("d1", MOST_PASSES, 0.0, 0, beat(0), "passed"),
        ("d1", MOST_PASSES + 1, 0.0, 0, beat(0), "spilled"),
        ("d1", 1, YOUNG_S, 0, beat(0), "spilled"),
        ("d1", 1, -5.0, 0, beat(0), "passed"),
        ("d1", 1, 0.0, 0, None, "spilled"),
        ("d1", 1, 0.0, 0, beat(4), "spilled"),
        ("d1", 1, 0.0, 4, beat(4), "spilled"),
        ("d1", 1, 0.0, 0, beat(2), "passed"),
        ("d1", 1, 0.0, 0, beat(3), "spilled"),
        ("d1", 1, 0.0, 1, beat(3), "passed"),
        ("d1", 1, 0.0, 0, beat(0, slots=1), "passed"),
        ("d1", 1, 0.0, 0, beat(1, slots=1), "spilled"),
    ],
)
def test_what_becomes_of_a_job(
    prefer: str, deliveries: int, waited_s: float, busy: int, of_preferred: WorkerBeat | None, expected: Preferred
) -> None:
    found = judge(prefer, "d2", deliveries=deliveries, waited_s=waited_s, busy=busy, beat=of_preferred)
    assert found == expected


async def test_who_prefers_nobody_else_costs_no_question() -> None:
    """There is no fleet to ask here: whoever asked would fail."""
    nobody: Any = None
    metrics = Metrics(["m"])
    preference = Preference(nobody, metrics, "d2", lambda: 1)
    delivery = Delivery(nobody, "pdq.decode.m.normal.t.r", b"", {}, f"$JS.ACK.PDQ_DECODE.c.1.5.1.{time.time_ns()}.0")
    found = [await preference.judge(job(prefer), delivery) for prefer in ("", "d2")]
    with pytest.raises(AttributeError):
        await preference.judge(job("d1"), delivery)
    assert found == ["none", "kept"]
    assert 'pdq_decode_preference_total{result="kept"} 1.0' in metrics.text().decode()


@pytest.mark.parametrize(
    ("prefer", "deliveries", "waited_s", "expected"),
    [("d1", 2, 0.1, True), ("", 2, 0.1, False), ("d1", 2, 5.0, False), ("d1", MOST_PASSES + 2, 0.1, False)],
)
def test_what_was_passed_on_is_told_from_what_failed(
    prefer: str, deliveries: int, waited_s: float, expected: bool
) -> None:
    nobody: Any = None
    stored_ns = int((time.time() - waited_s) * 1e9)
    reply = f"$JS.ACK.PDQ_DECODE.c.{deliveries}.5.1.{stored_ns}.0"
    delivery = Delivery(nobody, "pdq.decode.m.normal.t.r", b"", {}, reply)
    assert passed_before(job(prefer), delivery) == expected


def job(prefer: str) -> DecodeJob:
    sampling = Sampling(max_tokens=1)
    return DecodeJob(request="r", tenant="t", model="m", deadline=0.0, prompt=b"", sampling=sampling, prefer=prefer)
