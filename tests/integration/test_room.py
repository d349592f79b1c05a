"""How often a prefill worker asks how much KV waits for decode."""

from __future__ import annotations

import asyncio

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.messages import LANES
from pdq.stage import room
from pdq.stage.room import FEW, Room

from tests.stack import MODEL

HANDOFF = 1_000
"""Bytes."""
AMPLE, SCARCE = 100 * HANDOFF, 2 * FEW * HANDOFF


@pytest.fixture
async def asked(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the broker is asked of decode's queues from now on. Its last word is always an old one."""
    monkeypatch.setattr(room, "FRESH_S", 0.0)
    found: list[str] = []
    await bus.subscribe(f"$JS.API.CONSUMER.INFO.{subjects.DECODE}.*", lambda message: found.append(message.subject))
    return found


async def _work(bus: Bus, asked: list[str], room_bytes: int, jobs: int) -> int:
    """How many times a worker asks that does so many jobs."""
    found = Room(bus, MODEL, room_bytes)
    for _ in range(jobs):
        await found.wait()
        found.stored(HANDOFF)
    await bus.flush()
    return len(asked) // len(LANES)


async def test_with_room_to_spare_it_asks_once_for_a_few_handoffs(bus: Bus, asked: list[str]) -> None:
    assert await _work(bus, asked, AMPLE, 1 + 3 * FEW) == 3


async def test_with_little_room_it_asks_for_each(bus: Bus, asked: list[str]) -> None:
    assert await _work(bus, asked, SCARCE, 9) == 8


async def test_what_waits_holds_it_up(bus: Bus, asked: list[str]) -> None:
    for number in range(2 * FEW):
        await bus.publish(subjects.job("decode", MODEL, "normal", "t", f"r{number}"), b"{}")
    full = Room(bus, MODEL, SCARCE)
    full.stored(HANDOFF)
    waiting = asyncio.create_task(full.wait())
    while len(asked) < 3 * len(LANES):
        await asyncio.sleep(0.01)
    assert not waiting.done()
    await bus.purge(subjects.DECODE, "pdq.decode.>")
    async with asyncio.timeout(20):
        await waiting
