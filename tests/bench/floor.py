"""The floor: the same durable hops as pdq's path, and nothing else. `python -m tests.bench.floor ROLE`.

Three small processes, on nats-py alone, do per request what cannot be left out: three work queues, six
compare-and-set writes of the state, the deadline's timer and its end, token batches with counted
acknowledgements, and the live copy. Payloads are zeros of the sizes that pdq's have. There are no spans,
codecs, metrics, beats or log lines, no reading before a write (the last sequence travels with the job), no
priorities, and no recovery of anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import nats
import nats.errors
import uvloop
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from tests.bench.shape import Shape

SLOTS = 16
"""Requests that each process works on at one time."""
DEADLINE_S = 600
PULL_S = 20.0
END = b"F"
"""First byte of the last state record."""
SEQ, REQUEST = "Floor-Seq", "Floor-Request"
TENANT, MODEL = "local", "sim"


class Settings(msgspec.Struct):
    """The one argument of a process, as JSON."""

    role: str
    url: str
    shape: Shape


class Floor:
    """What the three roles share."""

    def __init__(self, nc: NatsClient, shape: Shape) -> None:
        self.nc = nc
        self.js = nc.jetstream()
        self.shape = shape
        self._inbox = nc.new_inbox()
        self._expected: dict[str, tuple[int, asyncio.Future[None]]] = {}

    async def count_acks(self) -> None:
        await self.nc.subscribe(f"{self._inbox}.*", cb=self._on_ack)

    async def state(self, request: str, number: int, after: int) -> int:
        """Write the state record of that number by compare and set; returns its sequence."""
        data = bytes(self.shape.states[number])
        if number == len(self.shape.states) - 1:
            data = END + data[1:]
        headers = {"Nats-Expected-Last-Subject-Sequence": str(after)}
        ack = await self.js.publish(f"floor.log.{TENANT}.{request}.state", data, headers=headers)
        return int(ack.seq)

    async def set_timer(self, request: str) -> None:
        moment = datetime.fromtimestamp(int(time.time()) + DEADLINE_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        target = f"floor.reap.due.{TENANT}.{request}"
        headers = {"Nats-Schedule": f"@at {moment}", "Nats-Schedule-Target": target}
        await self.js.publish(f"floor.reap.timer.{TENANT}.{request}", b"", headers=headers)

    async def stop_timer(self, request: str) -> None:
        await self.js.purge_stream("FLOOR_REAP", subject=f"floor.reap.timer.{TENANT}.{request}")

    async def job(self, stage: str, request: str, size: int, seq: int) -> None:
        headers = {"Nats-Msg-Id": f"{TENANT}.{request}.{stage}", SEQ: str(seq)}
        await self.js.publish(f"floor.{stage}.{MODEL}.normal.{TENANT}.{request}", bytes(size), headers=headers)

    async def tokens(self, request: str) -> None:
        """Publish all token batches, then wait until each is acknowledged."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expected[request] = (len(self.shape.outs), stored)
        for size in self.shape.outs:
            await self.nc.publish(f"floor.log.{TENANT}.{request}.out", bytes(size), reply=f"{self._inbox}.{request}")
        if self.shape.outs:
            await asyncio.wait_for(stored, 10)
        del self._expected[request]

    async def _on_ack(self, message: Msg) -> None:
        request = message.subject.rpartition(".")[2]
        left, stored = self._expected[request]
        self._expected[request] = (left - 1, stored)
        if left == 1:
            stored.set_result(None)


async def route(floor: Floor, message: Msg) -> None:
    request = message.headers[REQUEST]
    seq = await floor.state(request, 0, 0)
    await floor.set_timer(request)
    seq = await floor.state(request, 1, seq)
    await floor.job("prefill", request, floor.shape.prefill_job, seq)
    await message.ack()


async def prefill(floor: Floor, message: Msg) -> None:
    request = message.subject.rpartition(".")[2]
    seq = await floor.state(request, 2, int(message.headers[SEQ]))
    seq = await floor.state(request, 3, seq)
    await floor.job("decode", request, floor.shape.decode_job, seq)
    await message.ack()


async def decode(floor: Floor, message: Msg) -> None:
    request = message.subject.rpartition(".")[2]
    seq = await floor.state(request, 4, int(message.headers[SEQ]))
    await floor.tokens(request)
    await floor.state(request, 5, seq)
    await message.ack()
    await floor.stop_timer(request)


ROLES: dict[str, tuple[str, str, Callable[[Floor, Msg], Awaitable[None]]]] = {
    "router": ("FLOOR_SUBMIT", "router", route),
    "prefill": ("FLOOR_PREFILL", f"{MODEL}-normal", prefill),
    "decode": ("FLOOR_DECODE", f"{MODEL}-normal", decode),
}


async def serve(settings: Settings) -> None:
    """Pull, one message for each free slot, until the process is ended."""
    nc = await nats.connect(settings.url)
    floor = Floor(nc, settings.shape)
    await floor.count_acks()
    stream, consumer, work = ROLES[settings.role]
    pull = await floor.js.pull_subscribe_bind(consumer, stream)
    slots = asyncio.Semaphore(SLOTS)
    running: set[asyncio.Task[None]] = set()

    def done(task: asyncio.Task[None]) -> None:
        running.discard(task)
        slots.release()
        task.result()

    print("ready", flush=True)
    while True:
        await slots.acquire()
        task = asyncio.create_task(_work(floor, work, await _next(pull)))
        running.add(task)
        task.add_done_callback(done)


async def _work(floor: Floor, work: Callable[[Floor, Msg], Awaitable[None]], message: Msg) -> None:
    await work(floor, message)


async def _next(pull: Any) -> Msg:
    while True:
        with contextlib.suppress(nats.errors.TimeoutError):
            return (await pull.fetch(1, timeout=PULL_S))[0]


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(msgspec.json.decode(sys.argv[1], type=Settings)))
