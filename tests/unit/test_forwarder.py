"""The forwarder's order, and what it says to the hub."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from pdq.bus import Bus, Delivery
from pdq.settings import BusSettings
from pdq_forwarder import window as windows
from pdq_forwarder.forward import name_of, onward
from pdq_forwarder.window import Place, Window


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "RETRY_S", 0.01)


class Line:
    """Requests that wait for their turn; `going`: whose turn came, in that order."""

    def __init__(self, most: int = 8) -> None:
        self.window = Window(most)
        self.going: list[int] = []
        self._places: dict[int, tuple[contextlib.ExitStack, Place]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, *seqs: int) -> None:
        for seq in seqs:
            stack = contextlib.ExitStack()
            self._places[seq] = stack, stack.enter_context(self.window.place(seq))
            self.wait(seq)
        await self.settle()

    def wait(self, seq: int) -> None:
        async def turn() -> None:
            await self.window.turn(self._places[seq][1])
            self.going.append(seq)

        self._tasks.append(asyncio.create_task(turn()))

    async def arrive(self, seq: int) -> None:
        self.window.arrived()
        self._places.pop(seq)[0].close()
        await self.settle()

    async def fail(self, *seqs: int) -> None:
        for seq in seqs:
            self.window.failed()
            self.wait(seq)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
def line() -> Iterator[Line]:
    yield Line()


async def wait_for(line: Line, going: list[int]) -> None:
    async with asyncio.timeout(5):
        while line.going != going:
            await asyncio.sleep(0.002)


async def test_the_first_goes_alone_and_each_that_arrives_doubles_the_window(line: Line) -> None:
    await line.join(*range(1, 21))
    assert line.going == [1]
    await line.arrive(1)
    assert line.going == [1, 2, 3]
    await line.arrive(2)
    assert line.going == [1, 2, 3, 4, 5, 6]
    await line.arrive(3)
    assert (line.window.size, line.going) == (8, list(range(1, 12)))
    await line.arrive(4)
    assert (line.window.size, line.going) == (8, list(range(1, 13)))
    await line.close()


async def test_after_a_failure_the_first_goes_again_alone_and_only_after_a_pause(line: Line) -> None:
    await line.join(1, 2, 3, 4, 5)
    await line.arrive(1)
    await line.arrive(2)
    assert line.going == [1, 2, 3, 4, 5]
    await line.fail(4, 3, 5)
    assert line.going == [1, 2, 3, 4, 5]
    await wait_for(line, [1, 2, 3, 4, 5, 3])
    await line.fail(3)
    await wait_for(line, [1, 2, 3, 4, 5, 3, 3])
    await line.arrive(3)
    assert line.going == [1, 2, 3, 4, 5, 3, 3, 4, 5]
    await line.close()


async def test_what_comes_again_goes_before_what_came_later(line: Line) -> None:
    await line.join(7, 8, 9)
    await line.join(3)
    await line.arrive(7)
    assert line.going == [7, 3, 8]
    await line.close()


async def test_an_old_success_opens_nothing_during_a_pause(line: Line) -> None:
    await line.join(1, 2, 3)
    await line.arrive(1)
    await line.fail(2)
    await line.arrive(3)
    assert line.window.size == 1
    await line.close()


async def test_nothing_is_taken_from_the_queue_that_could_not_go(line: Line) -> None:
    async with asyncio.timeout(1):
        await line.window.room()
    await line.join(1)
    waiting = asyncio.create_task(line.window.room())
    await line.settle()
    assert not waiting.done()
    await line.fail(1)
    await wait_for(line, [1, 1])
    assert not waiting.done()
    await line.arrive(1)
    async with asyncio.timeout(1):
        await waiting
    await line.close()


# headers


def delivery(headers: dict[str, str], seq: int = 1795995494105, model: str = "sim") -> Delivery:
    reply = f"$JS.ACK.PDQ_EDGE.forwarder.1.{seq}.1.1795995494500123456.0"
    return Delivery(Bus(BusSettings(), "test"), f"edge.submit.{model}", b"{}", headers, reply)


async def test_a_request_is_named_by_its_client_or_by_its_sequence_at_the_site() -> None:
    assert name_of(delivery({"Pdq-Request": "r-1"})) == "r-1"
    assert name_of(delivery({})) == name_of(delivery({"Pdq-Request": "no name"})) == "e-1795995494105"


async def test_the_hub_is_told_where_and_when_the_site_stored_it_whatever_the_client_says() -> None:
    sent = onward(delivery({"Pdq-Site-Seq": "1", "pdq-site-time": "1", "Pdq-Site-Too-Large": "1"}), {})
    assert sent == {"Pdq-Site-Seq": "1795995494105", "Pdq-Site-Time": "1795995494.500"}


async def test_the_clients_headers_go_on_and_its_words_to_the_sites_broker_do_not() -> None:
    own = {"Pdq-Request": "r-1", "Pdq-Deadline": "30", "X-Mine": "ünï", "Status": "503"}
    words = {"Nats-Msg-Id": "1", "nats-expected-stream": "PDQ_EDGE", "Traceparent": "00-old", "tracestate": "a=b"}
    cannot_be_sent = {"a(b)": "1", "": "2"}
    sent = onward(delivery({**own, **words, **cannot_be_sent}), {"traceparent": "00-new"})
    assert {name: value for name, value in sent.items() if not name.startswith("Pdq-Site-")} == {
        **own,
        "traceparent": "00-new",
    }
