"""The two readers of `tests.bench.streams`, each a process: one of SSE streams, one of the live subject alone.

Both note when each event of the log reached them, by its sequence in the log, on the clock of the machine
(`CLOCK_MONOTONIC` is one for all its processes). `python -m tests.bench.listen ROLE SETTINGS` prints `ready`, runs
until its standard input ends, and prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import nats
import uvloop
from nats.aio.msg import Msg

LIVE_OUT = "pdq.live.*.*.out"
OPENING_AT_ONCE = 50
LINE_BYTES = 1 << 20
NO_TEXT = b'"text":""'


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    nats_url: str = ""
    port: int = 0
    """Of the gateway, on loopback."""
    streams: int = 0
    body: str = ""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """When each event came: its sequence, in seconds of the machine's clock. Text chunks only."""

    events: dict[int, float]
    cpu_s: float
    """That this process used since it was ready."""
    ended: int = 0
    """Streams that came to `[DONE]`."""
    failed: tuple[str, ...] = ()


class SseReader:
    """Many streams of one gateway, over bare sockets: what a client library adds is not in the way."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.events: dict[int, float] = {}
        self.ended = 0
        self.failed: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Ask for all streams; returns once each has answered with its first text."""
        gate = asyncio.Semaphore(OPENING_AT_ONCE)
        begun = [asyncio.Event() for _ in range(self._settings.streams)]
        self._tasks = [asyncio.create_task(self._guarded(gate, first)) for first in begun]
        for first in begun:
            await first.wait()

    async def _guarded(self, gate: asyncio.Semaphore, first: asyncio.Event) -> None:
        try:
            await self._stream(gate, first)
        except (OSError, ValueError, asyncio.IncompleteReadError) as exc:
            self.failed.append(f"{type(exc).__name__}: {exc}"[:200])
        finally:
            first.set()

    async def _stream(self, gate: asyncio.Semaphore, first: asyncio.Event) -> None:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._settings.port, limit=LINE_BYTES)
            writer.write(self._request())
            status = await reader.readline()
            if b" 200 " not in status:
                raise ValueError(status.decode("latin-1").strip())
        seq, text = 0, False
        async for line in reader:
            if line.startswith(b"id: "):
                seq = int(line[4:])
            elif line.startswith(b"data: [DONE]"):
                self.ended += 1
                break
            elif line.startswith(b"data: "):
                text = b'"finish_reason":null' in line
            elif text and not line.strip():
                self.events[seq] = time.monotonic()
                first.set()
                text = False
        writer.close()

    def _request(self) -> bytes:
        body = self._settings.body.encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nPdq-Background: true\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class BareReader:
    """One core subscription of nats-py to everybody's live tokens: it parses nothing.

    A token that has no text yet (half a character) has no chunk of its own, and is left out.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.events: dict[int, float] = {}
        self.ended = 0
        self.failed: list[str] = []

    async def open(self) -> None:
        self._nc = await nats.connect(self._settings.nats_url)
        await self._nc.subscribe(LIVE_OUT, cb=self._take, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await self._nc.flush()

    async def _take(self, message: Msg) -> None:
        assert message.headers is not None
        if NO_TEXT not in message.data:
            self.events[int(message.headers["Nats-Sequence"])] = time.monotonic()

    async def close(self) -> None:
        await self._nc.close()


ROLES: dict[str, Callable[[Settings], SseReader | BareReader]] = {"sse": SseReader, "bare": BareReader}


async def main(role: str, settings: Settings) -> None:
    reader = ROLES[role](settings)
    gc.disable()  # its pauses would be taken for the gateway's
    await reader.open()
    began = _cpu_s()
    print("ready", flush=True)
    await _end_of_input()
    used = _cpu_s() - began
    await reader.close()
    seen = Seen(events=reader.events, cpu_s=used, ended=reader.ended, failed=tuple(reader.failed))
    sys.stdout.buffer.write(msgspec.json.encode(seen))


def _end_of_input() -> Awaitable[bytes]:
    return asyncio.to_thread(sys.stdin.buffer.read)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Settings)))
