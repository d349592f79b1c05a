"""A tenant that is over its limits, at the gateway."""

from __future__ import annotations

import pytest
from pdq.errors import QueueFull
from pdq.messages import ErrorInfo
from pdq_gateway.errors import Failed
from pdq_gateway.tenancy import PAUSE_S, Refused

OVER = Failed(ErrorInfo(code="rate_limit_exceeded", message="at its limit", retry_after_s=7.0))


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_tenant_that_was_refused_gets_that_answer_for_a_moment() -> None:
    clock = Clock()
    refused = Refused(clock)
    refused.check("a")
    refused.note("a", OVER)
    clock.now += PAUSE_S / 2
    with pytest.raises(Failed, match="at its limit") as again:
        refused.check("a")
    assert again.value.info == OVER.info
    refused.check("b")
    clock.now += PAUSE_S
    refused.check("a")


def test_what_says_nothing_of_a_tenant_is_not_remembered() -> None:
    refused = Refused(Clock())
    for error in (QueueFull("full"), Failed(ErrorInfo(code="queue_full", message="full"))):
        refused.note("a", error)
        refused.check("a")


def test_what_is_over_is_forgotten() -> None:
    clock = Clock()
    refused = Refused(clock)
    for number in range(100):
        refused.note(f"t{number}", OVER)
        clock.now += PAUSE_S
    assert len(refused._until) <= 2
