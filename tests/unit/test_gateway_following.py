"""The logs of several choices as one series of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from pdq.errors import PdqError, Unavailable
from pdq.messages import Event, Output
from pdq_gateway.following import MOST_WAITING, Following


class Log:
    """What a follower gives: these events, then perhaps an error. `taken`: how many were asked for."""

    def __init__(self, count: int, error: PdqError | None = None) -> None:
        self.taken = 0
        self._count = count
        self._error = error

    async def events(self, timeout_s: float) -> AsyncGenerator[Event, None]:
        for seq in range(self._count):
            self.taken += 1
            yield Event(seq=seq, out=Output.of(1, seq, [seq], "x"))
        if self._error is not None:
            raise self._error


def following(*logs: Log) -> Following:
    given: Any = logs
    found = Following(given, 10)
    found.start()
    return found


async def test_each_log_is_in_order_and_whole() -> None:
    found = following(Log(100), Log(7))
    heard = []
    while new := await found.next(0.05):
        heard += new
    await found.close()
    assert [item.event.seq for item in heard if item.choice == 0] == list(range(100))
    assert [item.event.seq for item in heard if item.choice == 1] == list(range(7))


async def test_an_error_comes_after_what_was_before_it() -> None:
    found = following(Log(3, Unavailable("gone")))
    assert [item.event.seq for item in await found.next(1)] == [0, 1, 2]
    with pytest.raises(Unavailable, match="gone"):
        await found.next(1)
    await found.close()


async def test_what_nobody_takes_is_not_asked_for() -> None:
    log = Log(10_000)
    found = following(log)
    assert await found.next(1)
    assert await found.next(1)
    assert log.taken <= 3 * MOST_WAITING
    await found.close()


async def test_silence_is_nothing() -> None:
    found = following(Log(0))
    assert await found.next(0.01) == []
    await found.close()
