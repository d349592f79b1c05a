"""What a request waits for between its stages at the least: bare publishes to work queues, and their delivery."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import nats
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StreamConfig

from tests.broker import Broker

STAGES = ("prefill", "decode")
JOB_BYTES = 2_000
WAIT_S = 10.0
WAITING_S = 0.005
"""For a pull to reach the broker before the message that it waits for."""


async def durable_s(directory: Path, repeats: int) -> list[float]:
    """Seconds of one hop to each stage, with a broker that syncs every write: acknowledged and delivered."""
    broker = Broker(directory)
    broker.jetstream = 'sync_interval: "always"\n'
    broker.start()
    try:
        nc = await nats.connect(broker.url)
        try:
            hops = [await _Hop.make(nc.jetstream(), stage) for stage in STAGES]
            for hop in hops:
                await hop.once()
            return [sum([await hop.once() for hop in hops]) for _ in range(repeats)]
        finally:
            await nc.close()
    finally:
        broker.stop()


class _Hop:
    """A work queue of one stage, and who waits for its messages."""

    def __init__(self, js: JetStreamContext, stage: str, pull: JetStreamContext.PullSubscription) -> None:
        self._js = js
        self._subject = f"hop.{stage}"
        self._pull = pull

    @classmethod
    async def make(cls, js: JetStreamContext, stage: str) -> _Hop:
        config = StreamConfig(name=stage, subjects=[f"hop.{stage}"], retention=RetentionPolicy.WORK_QUEUE)
        await js.add_stream(config)
        return cls(js, stage, await js.pull_subscribe(f"hop.{stage}", "workers", stream=stage))

    async def once(self) -> float:
        """Seconds from a publish to both its acknowledgement and its delivery."""
        delivery = asyncio.create_task(self._pull.fetch(1, WAIT_S))
        await asyncio.sleep(WAITING_S)
        began = time.perf_counter()
        await self._js.publish(self._subject, bytes(JOB_BYTES))
        (message,) = await delivery
        seconds = time.perf_counter() - began
        await message.ack()
        return seconds
