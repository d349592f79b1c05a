"""Answers that all who ask at one time share."""

from __future__ import annotations

import asyncio
import time

import pytest
from pdq.errors import Unavailable
from pdq.stage import fleet
from pdq.stage.fleet import Fresh


class Source:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.fails = False

    async def read(self, key: str) -> int:
        self.asked.append(key)
        await self.go.wait()
        if self.fails:
            raise Unavailable("no answer")
        return len(self.asked)


async def test_those_who_ask_together_share_one_answer_and_it_stays_fresh() -> None:
    source = Source()
    fresh = Fresh(source.read)
    waiting = [asyncio.create_task(fresh.get("a")) for _ in range(20)]
    await asyncio.sleep(0)
    source.go.set()
    assert await asyncio.gather(*waiting) == [1] * 20
    assert await fresh.get("a") == 1 and await fresh.get("b") == 2
    assert source.asked == ["a", "b"]


async def test_an_answer_that_is_old_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    source.go.set()
    fresh = Fresh(source.read)
    assert await fresh.get("a") == 1
    monkeypatch.setattr(fleet, "FRESH_S", 0.0)
    assert await fresh.get("a") == 2


async def test_a_failure_is_shared_by_those_who_wait_and_by_nobody_else() -> None:
    source = Source()
    source.fails = True
    fresh = Fresh(source.read)
    waiting = [asyncio.create_task(fresh.get("a")) for _ in range(20)]
    await asyncio.sleep(0)
    source.go.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in found) and source.asked == ["a"]
    source.fails = False
    assert await fresh.get("a") == 2


async def test_one_who_goes_takes_the_answer_from_nobody() -> None:
    source = Source()
    fresh = Fresh(source.read)
    gone, stays = asyncio.create_task(fresh.get("a")), asyncio.create_task(fresh.get("a"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    source.go.set()
    assert await stays == 1 and gone.cancelled()


async def test_old_answers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker that is asked for has an answer of its own, and workers come and go."""
    source = Source()
    source.go.set()
    fresh = Fresh(source.read)
    monkeypatch.setattr(fleet, "FRESH_S", 0.0)
    for number in range(100):
        await fresh.get(f"worker {number}")
    assert len(fresh._asked) <= 2


async def test_what_takes_long_to_read_is_read_more_rarely_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    source = Source()
    fresh = Fresh(source.read, most_s=3.0)

    async def read_for(seconds: float) -> None:
        nonlocal now
        source.go.clear()
        waiting = asyncio.create_task(fresh.get("a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now += seconds
        source.go.set()
        await waiting

    for took_s, good_s in ((0.001, 1.0), (0.04, 2.0), (0.5, 3.0)):
        now += 10
        before, began = len(source.asked), now
        await read_for(took_s)
        now = began + good_s - 0.01
        await fresh.get("a")
        assert len(source.asked) == before + 1, took_s
        now = began + good_s + 0.01
        await fresh.get("a")
        assert len(source.asked) == before + 2, took_s
