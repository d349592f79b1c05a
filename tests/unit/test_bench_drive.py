"""The open loop, on targets that answer as each test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from pdq.bench import calibrate
from pdq.bench.drive import Drive, Options
from pdq.bench.prompts import Prompts, Scale
from pdq.bench.records import INTERRUPTED, Record
from pdq.bench.target import Api, Ask, Failed, Hearing
from pdq.bench.workload import Load, TimedRequest

Answer = Callable[[Ask, Hearing], Awaitable[None]]
BOUND_S = 10.0


class Scripted:
    """A target whose answers a test writes."""

    model = "m"

    def __init__(self, answer: Answer, api: Api = "completions") -> None:
        self.api = api
        self._answer = answer
        self.num_asked = 0

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        self.num_asked += 1
        await self._answer(ask, hearing)


def at(*times_s: float) -> Load:
    return [TimedRequest(at_s=time, input_tokens=9, output_tokens=2) for time in times_s]


async def drive(target: Scripted, load: Load, found: list[Record], **options: float) -> None:
    settled = Options(options.get("timeout_s", BOUND_S), int(options.get("most", 1000)), options.get("warm_up_s", 0.0))
    async with asyncio.timeout(BOUND_S):
        await Drive(target, Prompts("completions", "m", {}), settled, found.append).run(load)


async def at_once(ask: Ask, hearing: Hearing) -> None:
    hearing.chunk(1)
    hearing.chunk(1)


async def test_requests_are_sent_whatever_became_of_those_before() -> None:
    """None is answered before all were asked for: a closed loop would wait for ever."""
    everyone = asyncio.Barrier(20)

    async def together(ask: Ask, hearing: Hearing) -> None:
        await everyone.wait()
        await at_once(ask, hearing)

    found: list[Record] = []
    await drive(Scripted(together), at(*[0.001 * number for number in range(20)]), found)
    assert len(found) == 20
    assert all(record.succeeded and record.output_tokens == 2 for record in found)
    assert all(record.sent_s >= record.planned_s for record in found)
    assert not any(record.held for record in found)


async def test_the_bound_holds_requests_back_and_says_so() -> None:
    running = most = 0

    async def counted(ask: Ask, hearing: Hearing) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        await at_once(ask, hearing)
        running -= 1

    found: list[Record] = []
    await drive(Scripted(counted), at(0, 0, 0, 0), found, most=2)
    assert most == 2
    assert sum(record.held for record in found) == 2


async def test_failures_are_records_with_their_code() -> None:
    async def failing(ask: Ask, hearing: Hearing) -> None:
        hearing.chunk(1)
        raise Failed("queue_full", "no room")

    async def silent(ask: Ask, hearing: Hearing) -> None:
        try:
            await asyncio.sleep(BOUND_S)
        finally:
            await asyncio.sleep(0.3)

    found: list[Record] = []
    await drive(Scripted(failing), at(0), found)
    await drive(Scripted(silent), at(0), found, timeout_s=0.05)
    assert [(record.error, record.succeeded) for record in found] == [("queue_full", False), ("timeout", False)]
    assert found[0].message == "no room"
    # What it takes to end a request is none of its time.
    assert found[1].end_s == pytest.approx(found[1].sent_s + 0.05)
    assert len(found[0].chunks) == 1


async def test_a_load_that_is_stopped_records_what_ran() -> None:
    given_up = 0

    async def endless(ask: Ask, hearing: Hearing) -> None:
        nonlocal given_up
        hearing.chunk(1)
        try:
            await asyncio.sleep(BOUND_S)
        except asyncio.CancelledError:
            given_up += 1
            raise

    found: list[Record] = []
    target = Scripted(endless)
    task = asyncio.create_task(drive(target, at(0, 0, 0, 5.0), found))
    while target.num_asked < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.error for record in found] == [INTERRUPTED] * 3
    assert given_up == 3


async def test_the_warm_up_is_marked() -> None:
    found: list[Record] = []
    await drive(Scripted(at_once), at(0, 0.01, 0.02), found, warm_up_s=0.01)
    assert [record.warm_up for record in found] == [True, False, False]


async def test_a_words_tokens_are_measured() -> None:
    async def counting(ask: Ask, hearing: Hearing) -> None:
        words = ask.body.decode().partition('"content":"')[2].partition('"')[0].split()
        hearing.chunk(1)
        hearing.usage(30 + 5 * len(words), 1)

    async def telling_nothing(ask: Ask, hearing: Hearing) -> None:
        hearing.chunk(1)

    prompts = Prompts("chat", "m", {})
    assert await calibrate.measure(Scripted(counting, "chat"), prompts, BOUND_S) == Scale(30, 5)
    assert await calibrate.measure(Scripted(telling_nothing), prompts, BOUND_S) == Scale(0, 1)
    with pytest.raises(Failed, match="how many tokens"):
        await calibrate.measure(Scripted(telling_nothing, "chat"), prompts, BOUND_S)
