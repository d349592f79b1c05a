"""What can fail on the way of KV: how each fault is made, when, in which modes, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, NamedTuple

from tests.e2e.conftest import KvServer
from tests.e2e.stores import MODES as SHARING
from tests.matrix.chunks import Redis
from tests.matrix.rig import MODES, Rig

TAMPERED = ("file", "redis", "s3")
BEHIND_PROXY = ("redis", "s3")
OWN_PROCESS = ("redis", "s3", "p2p")

SMALL_GB = 0.01
"""Memory for fewer tokens than the prompt has."""
SMALL_FILE = 1 << 20
"""Bytes: less than a chunk has."""
DELAY_S = 0.2
"""Of each 64 KiB: some seconds a chunk."""
STEP_S = 0.05
"""Of decode's engine, with a stream or two."""
STOPPED_S, RUNNING_S = 1.5, 0.3
"""A server that is slow stands still and runs by turns."""

When = Literal["before", "waiting", "loading"]
"""Before the request is submitted; while its handoff waits for a slot; once decode's lookup was answered."""


class Fault(NamedTuple):
    name: str
    when: When
    modes: Sequence[str]
    make: Callable[[Rig, list[str]], AbstractAsyncContextManager[None]]
    """It lasts for the length of a `with`. Gets the names of the prompt's chunks in the store, where there is one."""


Act = Callable[[Rig, list[str]], Awaitable[None] | None]


def lasting(begin: Act, end: Act) -> Callable[[Rig, list[str]], AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def fault(rig: Rig, chunks: list[str]) -> AsyncIterator[None]:
        try:
            await _done(begin, rig, chunks)
            yield
        finally:
            await _done(end, rig, chunks)

    return fault


async def _done(act: Act, rig: Rig, chunks: list[str]) -> None:
    """Off the loop where it blocks: a stream's tokens are timed there."""
    if (going := await asyncio.to_thread(act, rig, chunks)) is not None:
        await going


def _nothing(rig: Rig, chunks: list[str]) -> None:
    pass


def _down(server: Callable[[Rig], KvServer]) -> Callable[[Rig, list[str]], AbstractAsyncContextManager[None]]:
    return lasting(lambda rig, _: server(rig).kill(), lambda rig, _: server(rig).start())


def _hung(server: Callable[[Rig], KvServer]) -> Callable[[Rig, list[str]], AbstractAsyncContextManager[None]]:
    return lasting(
        lambda rig, _: server(rig).signal(signal.SIGSTOP),
        lambda rig, _: server(rig).signal(signal.SIGCONT),
    )


async def _stop_in_load(rig: Rig, chunks: list[str]) -> None:
    """A step after the lookup's answer: the engine counts on the KV by then."""
    await asyncio.sleep(STEP_S)
    rig.decode_server.signal(signal.SIGSTOP)


def _go_on(rig: Rig, chunks: list[str]) -> None:
    rig.decode_server.signal(signal.SIGCONT)


def _prefills(rig: Rig) -> KvServer:
    return rig.prefill_server


def _decodes(rig: Rig) -> KvServer:
    return rig.decode_server


async def _restart(rig: Rig, chunks: list[str]) -> None:
    rig.decode_server.kill()
    await rig.decode_server.start()


@contextlib.asynccontextmanager
async def _slow(rig: Rig, chunks: list[str]) -> AsyncIterator[None]:
    """Redis and S3: a slow network; else a server that is slow."""
    if rig.proxy is not None:
        rig.proxy.delay(DELAY_S)
        try:
            yield
        finally:
            rig.proxy.heal()
        return
    task = asyncio.create_task(_stutter(rig.prefill_server))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _stutter(server: KvServer) -> None:
    try:
        while True:
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            server.signal(signal.SIGCONT)
            await asyncio.sleep(RUNNING_S)
    finally:
        server.signal(signal.SIGCONT)


async def _fill(rig: Rig, chunks: list[str]) -> None:
    """The tier that decode reads from has no room for a prompt."""
    if rig.mode == "file":
        _limit_files(rig, SMALL_FILE)
    elif isinstance(rig.chunks, Redis):
        _limit_redis(rig.chunks, b"1")
    else:
        rig.prefill_server.kill()
        await rig.prefill_server.start(memory_gb=SMALL_GB)


async def _make_room(rig: Rig, chunks: list[str]) -> None:
    if rig.mode == "file":
        _limit_files(rig, resource.RLIM_INFINITY)
    elif isinstance(rig.chunks, Redis):
        _limit_redis(rig.chunks, b"0")
    else:
        rig.prefill_server.kill()
        await rig.prefill_server.start()


def _limit_files(rig: Rig, size: int) -> None:
    """As a full disk: a write fails halfway."""
    for server in rig.servers:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _limit_redis(store: Redis, size: bytes) -> None:
    assert store.ask(b"CONFIG", b"SET", b"maxmemory", size) == b"OK"


def _flip(rig: Rig, chunks: list[str]) -> None:
    assert rig.chunks is not None
    for name in chunks:
        data = bytearray(rig.chunks.read(name))
        data[len(data) // 2] ^= 1
        rig.chunks.write(name, bytes(data))


def _truncate(rig: Rig, chunks: list[str]) -> None:
    assert rig.chunks is not None
    for name in chunks:
        rig.chunks.write(name, rig.chunks.read(name)[:-1])


def _swap(rig: Rig, chunks: list[str]) -> None:
    """Each gets the next one's content."""
    assert rig.chunks is not None and len(chunks) > 1
    contents = [rig.chunks.read(name) for name in chunks]
    for name, data in zip(chunks, [*contents[1:], contents[0]], strict=True):
        rig.chunks.write(name, data)


def _store(number: signal.Signals) -> Act:
    def act(rig: Rig, chunks: list[str]) -> None:
        assert rig.store.process is not None
        rig.store.process.signal(number)

    return act


def _kill_store(rig: Rig, chunks: list[str]) -> None:
    assert rig.store.process is not None
    rig.store.process.kill()


def _start_store(rig: Rig, chunks: list[str]) -> None:
    assert rig.store.process is not None
    rig.store.process.start()


def _evict_all(rig: Rig, chunks: list[str]) -> None:
    """From decode's own memory too, but for what is locked."""
    rig.evict()
    rig.clear_memory(rig.decode_server)


STORE_DOWN = lasting(_kill_store, _start_store)
STORE_HUNG = lasting(_store(signal.SIGSTOP), _store(signal.SIGCONT))

FAULTS = (
    Fault("none", "waiting", MODES, lasting(_nothing, _nothing)),
    Fault("prefill's server down", "before", MODES, _down(_prefills)),
    Fault("prefill's server hung", "before", MODES, _hung(_prefills)),
    Fault("prefill's server down", "waiting", SHARING, _down(_prefills)),
    Fault("prefill's server hung", "waiting", SHARING, _hung(_prefills)),
    Fault("decode's server down", "waiting", MODES, _down(_decodes)),
    Fault("decode's server hung", "waiting", MODES, _hung(_decodes)),
    Fault("decode's server hung", "loading", MODES, _hung(_decodes)),
    Fault("decode's server hung a step later", "loading", MODES, lasting(_stop_in_load, _go_on)),
    Fault("decode's server restarted", "waiting", MODES, lasting(_restart, _nothing)),
    Fault("store full", "before", ("host", "file", "redis", "p2p"), lasting(_fill, _make_room)),
    Fault("store slow", "before", MODES, _slow),
    Fault("store slow", "waiting", BEHIND_PROXY, _slow),
    Fault("store down", "before", OWN_PROCESS, STORE_DOWN),
    Fault("store down", "waiting", OWN_PROCESS, STORE_DOWN),
    Fault("store hung", "before", OWN_PROCESS, STORE_HUNG),
    Fault("store hung", "waiting", OWN_PROCESS, STORE_HUNG),
    Fault("chunks flipped", "waiting", TAMPERED, lasting(_flip, _nothing)),
    Fault("chunks truncated", "waiting", TAMPERED, lasting(_truncate, _nothing)),
    Fault("chunks swapped", "waiting", TAMPERED, lasting(_swap, _nothing)),
    Fault("evicted", "waiting", MODES, lasting(lambda rig, _: rig.evict(), _nothing)),
    Fault("evicted", "loading", MODES, lasting(_evict_all, _nothing)),
)
"""p2p's store is its coordinator."""
HARMLESS = {
    ("none", "waiting"): MODES,
    ("prefill's server down", "waiting"): TAMPERED,
    ("prefill's server hung", "waiting"): TAMPERED,
    ("store down", "before"): ("p2p",),
    ("store down", "waiting"): ("p2p",),
    ("store hung", "before"): ("p2p",),
    ("store hung", "waiting"): ("p2p",),
}
"""Where KV gets through all the same: decode has the pool; peers that know each other need no coordinator."""
