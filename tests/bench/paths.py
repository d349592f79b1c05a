"""The two paths that are compared: pdq's real services, and the floor's. Each submits and follows requests."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec
import nats
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.log import Transcript

from tests.bench.floor import END, REQUEST, ROLES, SLOTS, TENANT, Settings
from tests.bench.memory import kv_directory
from tests.bench.shape import Shape
from tests.stack import MODEL, Service, Stack, chat

PROMPT = "A short story about a message that went through three queues and was never lost, please. " * 2
NUM_TOKENS = 64
REQUEST_S = 30.0
"""Bound of one request."""
START_S = 20.0


class Timing(NamedTuple):
    """Seconds since just before the submit. `batches`: how many messages the tokens came in."""

    first_s: float
    end_s: float
    batches: int


class Branch(Protocol):
    """One way from a client to its tokens."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Its processes by role."""

    async def request(self) -> Timing:
        """Submit one request and follow it to its end. Raises when it does not end as it should."""


class Pdq:
    """Router, prefill and decode with the sim engine, asked by pdq's own client."""

    def __init__(
        self,
        directory: Path,
        trace_sample: float,
        roles: tuple[str, ...] = ("router", "prefill", "decode"),
        *,
        alike: bool = True,
        profile: str = "instant",
    ) -> None:
        """roles: those that have a process each here. alike: all prompts are the same, so that their KV is there, and
        decode jobs prefer the worker that had the one before. profile: how long the sim engine takes."""
        self._alike = alike
        self._kv = kv_directory(directory)
        self.stack = Stack(
            directory,
            PDQ_ENGINE_SIM_KV_DIR=self._kv.name,
            PDQ_WORKER_SLOTS=str(SLOTS),
            PDQ_ENGINE_MAX_NUM_SEQS=str(SLOTS),
            PDQ_ENGINE_SIM_PROFILE=profile,
            PDQ_TRACE_SAMPLE=str(trace_sample),
        )
        self._services: dict[str, Service] = {role: self.stack.add(f"pdq_{role}") for role in roles}
        self.bus: Bus
        self._client: Client

    async def __aenter__(self) -> Self:
        try:
            await self.stack.start()
            self.bus = await self.stack.connect()
        except BaseException:
            self._stop()
            raise
        self._client = Client(self.bus, TENANT)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self.stack.stop()
        self._kv.cleanup()

    @property
    def broker_pid(self) -> int:
        return _pid(self.stack.broker.process)

    @property
    def pids(self) -> dict[str, int]:
        return {role: _pid(service.process) for role, service in self._services.items()}

    async def request(self) -> Timing:
        request, transcript = new_request_id(), Transcript()
        body = chat(
            PROMPT if self._alike else other_prompt(request),
            max_tokens=NUM_TOKENS,
            min_tokens=NUM_TOKENS,
            temperature=0,
        )
        first_s, batches = 0.0, 0
        async with self._client.follow(request, catch_up=False) as follower:
            began = time.perf_counter()
            await self._client.submit(body, model=MODEL, request=request, order="prefill-first")
            async for event in follower.events(REQUEST_S):
                transcript.feed(event)
                if event.out is not None:
                    batches += 1
                    first_s = first_s or time.perf_counter() - began
            end_s = time.perf_counter() - began
        state = transcript.state
        if state is None or state.event != "finished" or not transcript.complete():
            raise AssertionError(f"request {request} did not finish: {state}")
        return Timing(first_s, end_s, batches)


class FloorPath:
    """The floor's processes, asked by a client of nats-py."""

    def __init__(self, url: str, shape: Shape) -> None:
        self._url = url
        self._shape = shape
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._nc: NatsClient
        self._js: Any

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            self._end_processes()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._nc.close()
        await asyncio.to_thread(self._end_processes)

    async def _start(self) -> None:
        for role in ROLES:
            argument = msgspec.json.encode(Settings(role, self._url, self._shape)).decode()
            command = [sys.executable, "-m", "tests.bench.floor", argument]
            self._processes[role] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for process in self._processes.values():
            assert process.stdout is not None
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
            assert line == "ready\n", f"a process of the floor did not start: exit code {process.poll()}"
        self._nc = await nats.connect(self._url)
        self._js = self._nc.jetstream()

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()

    @property
    def pids(self) -> dict[str, int]:
        return {role: _pid(process) for role, process in self._processes.items()}

    async def request(self) -> Timing:
        """Raises nats.errors.Error where the queue is full, and TimeoutError."""
        request = f"r-{secrets.token_hex(10)}"
        ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        firsts: list[float] = []

        async def take(message: Msg) -> None:
            if message.subject.endswith(".out"):
                firsts.append(time.perf_counter())
            elif message.data.startswith(END):
                ended.set_result(time.perf_counter())

        subscription = await self._nc.subscribe(f"floor.live.{TENANT}.{request}.*", cb=take)
        try:
            # The first yield lets the SUB out before the flush's PING, as pdq's own client does.
            await asyncio.sleep(0)
            await self._nc.flush()
            began = time.perf_counter()
            headers = {REQUEST: request}
            await self._js.publish(f"floor.submit.{TENANT}.{MODEL}", bytes(self._shape.submit), headers=headers)
            end_s = await asyncio.wait_for(ended, REQUEST_S) - began
        finally:
            await subscription.unsubscribe()
        if len(firsts) != len(self._shape.outs):
            raise AssertionError(f"request {request}: {len(firsts)} of {len(self._shape.outs)} token batches came")
        return Timing(firsts[0] - began, end_s, len(firsts))


def other_prompt(request: str) -> str:
    """One whose KV is nowhere, not even a part of it."""
    return f"{request}: {PROMPT}"


async def make_floor_streams(bus: Bus, limits: subjects.Limits) -> None:
    """The floor's streams and consumers: configured as pdq's, under other names."""
    wanted = {subjects.SUBMIT, subjects.PREFILL, subjects.DECODE, subjects.LOG, subjects.REAP}
    for config in subjects.streams(limits):
        if config["name"] in wanted:
            await bus.ensure_stream(_renamed(config))
    for stream, config in subjects.consumers(limits, [MODEL]):
        await bus.ensure_consumer(_renamed(stream), _renamed(config))


def _renamed(value: Any) -> Any:
    text = msgspec.json.encode(value).decode()
    return msgspec.json.decode(text.replace("PDQ_", "FLOOR_").replace('"pdq.', '"floor.'))


def _pid(process: subprocess.Popen[Any] | None) -> int:
    assert process is not None and process.poll() is None, "a process of the benchmark has ended"
    return process.pid
