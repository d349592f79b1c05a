"""What the front makes of the connector's reports, and how they reach it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from pdq.engines.base import Work
from pdq.engines.reports import Inbox, Loaded, Looked, Report, Reporter, Stored
from pdq.engines.runs import Run
from pdq.engines.vllm_config import parse_cpus
from pdq.errors import Misconfigured
from pdq.kv.tier import Tier
from pdq.messages import Sampling
from pdq.settings import KvSettings

BOUND_S = 10.0


def looked(tier: int = 0, external: int = 0, local: int = 0) -> Looked:
    return Looked(
        run="r", request="r-1", local_tokens=local, tier_tokens=tier, external_tokens=external, start_ns=1, end_ns=2
    )


def loaded(ok: bool = True) -> Loaded:
    return Loaded(run="r", ok=ok, start_ns=3, end_ns=4)


def stored(first: int, end: int, ok: bool = True) -> Stored:
    return Stored(run="r", first=first, end=end, ok=ok, start_ns=5, end_ns=6)


def run(*reports: Report) -> Run:
    made = Run("r", Work(request="r", prompt=(1,) * 100, sampling=Sampling(max_tokens=1), salt="00"))
    for report in reports:
        made.hear(report)
    return made


@pytest.mark.parametrize(
    ("reports", "tokens"),
    [
        ((), 0),
        ((looked(), stored(0, 64)), 64),
        ((looked(), stored(0, 64), stored(64, 96)), 96),
        ((looked(), stored(64, 96), stored(0, 64)), 96),
        ((looked(tier=32), stored(32, 96)), 96),
        ((looked(tier=96),), 96),
        ((looked(), stored(32, 96)), 0),
        ((looked(tier=32), stored(64, 96)), 32),
        ((looked(), stored(0, 32), stored(32, 64, ok=False), stored(64, 96)), 32),
    ],
)
def test_stored_tokens_are_those_without_a_gap(reports: tuple[Report, ...], tokens: int) -> None:
    assert run(*reports).stored_tokens == tokens


@pytest.mark.parametrize(
    ("reports", "tokens"),
    [
        ((), 0),
        ((looked(tier=64, external=63),), 0),
        ((looked(tier=64, external=63), loaded()), 63),
        ((looked(tier=64, external=63), loaded(ok=False)), 0),
        ((looked(tier=64, external=63), loaded(ok=False), looked()), 0),
        ((looked(tier=64, external=63), loaded(), looked(tier=96, external=96), loaded()), 63),
    ],
)
def test_loaded_tokens_count_once_the_load_has_succeeded(reports: tuple[Report, ...], tokens: int) -> None:
    assert run(*reports).loaded_tokens == tokens


async def test_waiting_for_stores_ends_with_the_last_of_them() -> None:
    made = run(looked(), stored(0, 32))
    waiting = asyncio.create_task(made.wait_stored(96, BOUND_S))
    await asyncio.sleep(0)
    made.hear(stored(32, 64))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.hear(stored(64, 96))
    assert await waiting == ""


async def test_waiting_for_stores_says_why_it_was_in_vain() -> None:
    assert await run(looked(), stored(0, 32)).wait_stored(96, 0.01) == "store_late"
    assert await run(looked(), stored(0, 32), stored(32, 96, ok=False)).wait_stored(96, BOUND_S) == "store_failed"


def send(path: str, reports: list[Looked]) -> None:
    reporter = Reporter(path)
    for report in reports:
        reporter.send(report)
    reporter.close()


async def test_reports_arrive_in_order_from_several_reporters() -> None:
    heard: list[Any] = []
    inbox = Inbox(heard.append)
    path = inbox.open()
    try:
        sent = {number: [looked(tier=tokens, local=number) for tokens in range(1000)] for number in (1, 2)}
        await asyncio.gather(*(asyncio.to_thread(send, path, reports) for reports in sent.values()))
        inbox.drain()
        for number, reports in sent.items():
            assert [report for report in heard if report.local_tokens == number] == reports
    finally:
        inbox.close()


async def test_a_reporter_outlives_a_connection_that_breaks() -> None:
    heard: list[Report] = []
    inbox = Inbox(heard.append)
    reporter = Reporter(inbox.open())
    try:
        reporter.send(stored(0, 32))
        inbox.drain()
        reporter._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        reporter.send(stored(32, 64))
        reporter.send(stored(64, 96))
        inbox.drain()
        assert heard == [stored(0, 32), stored(64, 96)]
    finally:
        reporter.close()
        inbox.close()


def test_a_reporter_without_an_inbox_raises_nothing() -> None:
    Reporter("/nowhere/at/all").send(loaded())


async def test_closing_an_inbox_closes_what_is_connected_to_it() -> None:
    inbox = Inbox(lambda report: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(inbox.open())
        inbox.drain()
        inbox.close()
        inbox.close()
        assert connection.recv(1) == b""


async def test_a_tier_that_does_not_answer_holds_nothing() -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        tier = Tier(KvSettings(http_port=port.getsockname()[1]), "model")
        try:
            assert await tier.lacks([1] * 32, "00", BOUND_S)
            port.listen()  # connects, and never answers
            assert await tier.lacks([1] * 32, "00", 0.1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await tier.wait_up()
        finally:
            await tier.close()


@pytest.mark.parametrize(("text", "cpus"), [("", set()), ("0", {0}), ("0-3", {0, 1, 2, 3}), ("0,2-3", {0, 2, 3})])
def test_cpus_are_read(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-", "0;1"])
def test_bad_cpus_are_named(text: str) -> None:
    with pytest.raises(Misconfigured, match="PDQ_ENGINE_CPUS"):
        parse_cpus(text)
