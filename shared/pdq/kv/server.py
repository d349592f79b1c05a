"""The LMCache server: its command line, its environment, and how to know that it answers.

Its ports speak to anyone who reaches them, without authentication: they stay on loopback or an isolated network.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Literal

import aiohttp
import msgspec

from pdq.errors import Unavailable

POLL_S = 0.2
SHM_DIRECTORY = Path("/dev/shm")
SHM_PREFIX = "lmcache_l1_pool_"

TransferMode = Literal["auto", "engine_driven", "lmcache_driven"]


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One LMCache server for the engines of one host."""

    port: int
    """Engines speak to it here."""
    http_port: int
    """Health, metrics and look-ups."""
    chunk_tokens: int
    """Equal to the model's chunk_tokens in models.toml; engines read it from the server."""
    host: str = "127.0.0.1"
    memory_gb: float = 1.0
    """Size of the first tier; with shared memory, /dev/shm must have as much."""
    shm_name: str = ""
    """Shared memory segment through which engine-driven transfers pass; without one they pass as messages."""
    engines: int = 2
    """Engines that transfer at one time: one worker thread each, or they wait for each other."""
    transfer_mode: TransferMode = "auto"
    """What engines may use; `auto` allows both."""


def command(options: ServerOptions) -> list[str]:
    """The command line, for this process's own Python."""
    line = [sys.executable, "-m", "lmcache.cli.main", "server"]
    values = {
        "--host": options.host,
        "--port": options.port,
        "--http-host": options.host,
        "--http-port": options.http_port,
        "--chunk-size": options.chunk_tokens,
        "--l1-size-gb": options.memory_gb,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": options.transfer_mode,
        "--max-workers": options.engines + 1,
    }
    if options.shm_name:
        # A pool that grows has no one segment to share.
        line.append("--no-l1-use-lazy")
        values["--shm-name"] = options.shm_name
    return line + [str(word) for pair in values.items() for word in pair]


def environment() -> dict[str, str]:
    """What to add to the server's environment: no usage telemetry, no banner."""
    return {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


async def wait_ready(options: ServerOptions, timeout_s: float) -> None:
    """Return once the server answers that it is healthy. Raises Unavailable after `timeout_s`."""
    url = f"http://{options.host}:{options.http_port}/healthcheck"
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while True:
                if await _answers(session, url):
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as exc:
        raise Unavailable(f"the LMCache server at {url} did not answer within {timeout_s:g} s") from exc


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def remove_shared_memory(options: ServerOptions) -> None:
    """Free the segment of a server that was killed: only one that ends in order frees its own."""
    if options.shm_name:
        (SHM_DIRECTORY / f"{SHM_PREFIX}{options.shm_name}").unlink(missing_ok=True)
