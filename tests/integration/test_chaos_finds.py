"""Faults that chaos runs found, each made to happen for certain."""

from __future__ import annotations

import asyncio

from pdq import subjects
from pdq.bus import Bus, Puller

from tests.stack import MODEL


def job(request: str) -> str:
    return subjects.job("prefill", MODEL, "normal", "t", request)


def puller(bus: Bus) -> Puller:
    return Puller(bus, subjects.PREFILL, [subjects.consumer(MODEL, p) for p in ("high", "normal", "low")])


async def test_a_pull_hears_at_once_that_its_consumer_is_gone(bus: Bus) -> None:
    pull = puller(bus)
    waiting = asyncio.create_task(pull.get())
    await asyncio.sleep(0.3)
    await bus.api(f"CONSUMER.DELETE.{subjects.PREFILL}.{subjects.consumer(MODEL, 'low')}")
    async with asyncio.timeout(5):
        while not pull.missing:
            await asyncio.sleep(0.02)
    await bus.publish(job("r1"), b"")
    delivery = await asyncio.wait_for(waiting, 5)
    await delivery.ack()
    await pull.close()


async def test_a_client_cannot_hide_its_message_behind_a_status_header(bus: Bus) -> None:
    await bus.publish(job("r1"), b"", headers={"Status": "404"})
    pull = puller(bus)
    delivery = await asyncio.wait_for(pull.get(), 5)
    assert (subjects.parse_job(delivery.subject).request, delivery.num_delivered) == ("r1", 1)
    await delivery.ack()
    await pull.close()
