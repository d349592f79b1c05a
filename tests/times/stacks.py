"""The stacks that times are measured on, and calls that block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pdq.bus import Bus
from pdq.client import Client
from pdq.engines import sim_timing
from pdq.settings import EngineSettings, LimitSettings

from tests.stack import Stack

T = TypeVar("T")

TENANT = "times"
TOKEN_PROFILE = "llama2-70b-h100-tp8"
"""About 30 ms a token."""
TOKEN_S = sim_timing.parse(TOKEN_PROFILE).decode_ms(1, 100) / 1e3
CHUNK_PROFILE = f"{TOKEN_PROFILE}*10"
"""About half a second a chunk."""


def chunk_s(profile: str, prompt: int) -> float:
    """Seconds of the longest step of a prompt of so many tokens, alone in a sim engine."""
    times, budget = sim_timing.parse(profile), EngineSettings().max_num_batched_tokens
    steps = [times.prefill_ms(start, min(budget, prompt - start)) for start in range(0, prompt, budget)]
    return max(steps[0] + times.prefill[0], *steps[1:], 0.0) / 1e3


@contextlib.contextmanager
def stack(directory: Path, ack_wait_s: float, profile: str = "instant") -> Iterator[Stack]:
    """Add services, then enter `connected`. Whatever happens, no process is left behind."""
    directory.mkdir()
    limits = LimitSettings(ack_wait_s=ack_wait_s, worker_ttl_s=3.0)
    found = Stack(directory, limits=limits, PDQ_ENGINE_SIM_PROFILE=profile, PDQ_WORKER_DRAIN_S="1")
    try:
        yield found
    finally:
        found.stop()


@contextlib.asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[tuple[Bus, Client]]:
    """Start the stack and connect a client to it."""
    await stack.start()
    bus = await stack.connect()
    try:
        yield bus, Client(bus, TENANT)
    finally:
        await bus.close()


async def in_thread(work: Callable[[], T]) -> T:
    """A call that blocks. It goes on when its caller is cancelled, which waits for it then."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    finally:
        await asyncio.wait({task})
