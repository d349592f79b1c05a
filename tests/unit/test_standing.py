"""When pulls that found nothing are made anew."""

from __future__ import annotations

import msgspec
from pdq.bus import standing
from pdq.subjects import NANOSECONDS


def test_workers_that_began_together_do_not_ask_anew_together() -> None:
    expires_s = [msgspec.json.decode(standing.pull())["expires"] / NANOSECONDS for _ in range(1_000)]
    assert 15 <= min(expires_s) and max(expires_s) <= standing.EXPIRES_S
    in_the_fullest_second = max(sum(second <= each < second + 1 for each in expires_s) for second in range(15, 20))
    assert in_the_fullest_second < 300
