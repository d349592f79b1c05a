"""An LMCache server: how it is started and with what, what is checked before, and how to know that it answers.

Its ports speak to anyone who reaches them, without authentication: they stay on loopback or an isolated network.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from pdq.errors import Misconfigured, Unavailable
from pdq.kv import serde
from pdq.kv.pool import Pool
from pdq.settings import Group, KvServerSettings, KvSettings, variable

POLL_S = 0.2
SHM_DIRECTORY = Path("/dev/shm")
SHM_PREFIX = "lmcache_l1_pool_"

MAX_SECONDS = 86_400
PEER_HEARTBEAT_S = 1.0
"""How often a server of `p2p` tells the coordinator that it is there, and asks who else is."""
PEER_LOOKUP_S, PEER_LOAD_S = 2.0, 5.0


def command() -> list[str]:
    """The command line, for this process's own Python. Everything else it reads from its environment."""
    return [sys.executable, "-m", "pdq.kv.serve"]


def check(kv: KvSettings, server: KvServerSettings) -> None:
    """Raise Misconfigured, naming the setting, its value and its limit, for what LMCache would only fail at later."""
    for field in ("port", "http_port"):
        _within(kv, field, 1, 65_535)
    if kv.port == kv.http_port:
        raise Misconfigured(f"PDQ_KV_PORT and PDQ_KV_HTTP_PORT are both {kv.port}: they must differ")
    _above(server, "memory_gb")
    for field in ("watermark", "evict_share"):
        _above(server, field)
        _within(server, field, 0, 1)
    _within(server, "engines", 1, 1_024)
    for field in ("read_lock_s", "write_lock_s", "session_s"):
        _within(server, field, 1, MAX_SECONDS)
    _check_shared_memory(server)
    _check_mode(kv, server)


def _check_shared_memory(server: KvServerSettings) -> None:
    """LMCache itself would only warn, and pass every chunk as a message."""
    if not server.shm_name:
        return
    free = shutil.disk_usage(SHM_DIRECTORY).free if SHM_DIRECTORY.is_dir() else 0
    if free < server.memory_gb * (1 << 30):
        raise Misconfigured(
            f"{variable(KvServerSettings, 'memory_gb')} is {server.memory_gb:g}, but {SHM_DIRECTORY} has room for "
            f"{free / (1 << 30):.2f} GB: give it more, or leave {variable(KvServerSettings, 'shm_name')} empty"
        )


def _check_mode(kv: KvSettings, server: KvServerSettings) -> None:
    needed = {"pool": ("pool", "key_file"), "p2p": ("coordinator", "peer")}.get(kv.mode, ())
    for field in needed:
        if not getattr(kv, field):
            hint = ": `head -c 32 /dev/urandom > FILE; chmod 600 FILE` makes one" if field == "key_file" else ""
            raise Misconfigured(f"PDQ_KV_MODE is {kv.mode!r}: it needs {variable(KvSettings, field)}{hint}")
    if kv.mode != "pool" and kv.pool:
        raise Misconfigured(f"PDQ_KV_POOL is set, but PDQ_KV_MODE is {kv.mode!r}: it must be 'pool'")
    for field in ("pool_gb", "tenant_gb"):
        _within(server, field, 0, 1 << 20)
        if getattr(server, field) and kv.mode != "pool":
            raise Misconfigured(f"{variable(KvServerSettings, field)} bounds a pool: PDQ_KV_MODE is {kv.mode!r}")
    if server.pool_gb and server.tenant_gb:
        raise Misconfigured(
            "PDQ_KV_SERVER_POOL_GB and PDQ_KV_SERVER_TENANT_GB are both set: what goes from a pool is chosen either "
            "over all tenants or within each"
        )
    if kv.mode == "p2p":
        _check_address(kv, "coordinator", urlsplit(kv.coordinator).netloc, "http://host:port")
        _check_address(kv, "peer", kv.peer, "host:port")


def _check_address(kv: KvSettings, field: str, address: str, form: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 1 <= int(port) <= 65_535):
        raise Misconfigured(f"{variable(KvSettings, field)} is {getattr(kv, field)!r}: it must look like {form}")


def _above(group: Group, field: str, least: float = 0) -> None:
    if not getattr(group, field) > least:
        raise Misconfigured(f"{variable(type(group), field)} is {getattr(group, field):g}: it must be above {least:g}")


def _within(group: Group, field: str, least: float, most: float) -> None:
    value = getattr(group, field)
    if not least <= value <= most:
        raise Misconfigured(f"{variable(type(group), field)} is {value:g}: it must be from {least:g} to {most:g}")


def arguments(kv: KvSettings, server: KvServerSettings, chunk_tokens: int, pool: Pool | None) -> list[str]:
    """LMCache's own command line. No secret is in it.

    chunk_tokens: the model's; engines read it from the server.
    """
    values: dict[str, object] = {
        "--host": server.host,
        "--port": kv.port,
        "--http-host": server.host,
        "--http-port": kv.http_port,
        "--chunk-size": chunk_tokens,
        "--supported-transfer-mode": kv.transfer_mode,
        **_bounds(server),
        # What came from a pool or a peer stays in the first tier: the next turn of a conversation finds it near.
        "--l2-prefetch-policy": "retain",
    }
    flags = []
    if server.shm_name:
        # A pool that grows has no one segment to share.
        flags.append("--no-l1-use-lazy")
        values["--shm-name"] = server.shm_name
    if pool is not None:
        values["--l2-adapter"] = json.dumps(pool.adapter | {"serde": serde.spec(kv.key_file)} | _eviction(server))
    if kv.mode == "p2p":
        values |= _peer(kv, server)
    return ["server", *flags, *(str(word) for pair in values.items() for word in pair)]


def _bounds(server: KvServerSettings) -> dict[str, object]:
    return {
        "--l1-size-gb": _whole_mib(server.memory_gb),
        "--eviction-policy": "LRU",
        "--eviction-trigger-watermark": server.watermark,
        "--eviction-ratio": server.evict_share,
        "--l1-read-ttl-seconds": server.read_lock_s,
        "--l1-write-ttl-seconds": server.write_lock_s,
        "--session-ttl-seconds": server.session_s,
        "--max-workers": server.engines + 1,
    }


def _whole_mib(size_gb: float) -> float:
    """NIXL takes the first tier in pages: a server of p2p with a part of one does not start."""
    return max(1, int(size_gb * 1024)) / 1024


def _eviction(server: KvServerSettings) -> dict[str, object]:
    policy = "IsolatedLRU" if server.tenant_gb else "LRU" if server.pool_gb else ""
    if not policy:
        return {}
    bounds = {"trigger_watermark": server.watermark, "eviction_ratio": server.evict_share}
    return {"max_capacity_gb": server.pool_gb, "eviction": {"eviction_policy": policy, **bounds}}


def _peer(kv: KvSettings, server: KvServerSettings) -> dict[str, object]:
    host, _, port = kv.peer.rpartition(":")
    return {
        "--coordinator-url": kv.coordinator,
        "--coordinator-advertise-ip": host,
        "--coordinator-heartbeat-interval": PEER_HEARTBEAT_S,
        "--p2p-advertise-url": kv.peer,
        "--p2p-listen-url": f"{server.host}:{port}",
        "--p2p-transfer-engine": "nixl",
        "--p2p-lookup-timeout": PEER_LOOKUP_S,
        "--p2p-load-timeout": PEER_LOAD_S,
    }


def environment() -> dict[str, str]:
    """What LMCache reads from the environment: no usage telemetry, no banner."""
    return {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}


async def wait_ready(host: str, http_port: int, timeout_s: float) -> None:
    """Return once the server answers that it is healthy. Raises Unavailable after `timeout_s`."""
    url = f"http://{host}:{http_port}/healthcheck"
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


def shared_memory(shm_name: str) -> Path:
    """The segment of that name."""
    return SHM_DIRECTORY / f"{SHM_PREFIX}{shm_name}"


def remove_shared_memory(shm_name: str) -> None:
    """Free the segment of a server that was killed: only one that ends in order frees its own."""
    if shm_name:
        shared_memory(shm_name).unlink(missing_ok=True)
