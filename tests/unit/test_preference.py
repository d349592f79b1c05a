"""Which decode jobs a worker leaves to another."""

from __future__ import annotations

import pytest
from pdq.messages import WorkerBeat
from pdq.stage.preference import MOST_PASSES, YOUNG_S, Preferred, judge


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
