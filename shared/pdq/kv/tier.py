"""What the KV tiers hold, asked over the LMCache server's HTTP port.

A store's own result is not enough to promise anything to decode. It says that the store ran without an error:
chunks for which the server had no room are skipped without one, in its `lmcache_driven` mode the server answers
before the chunks can be read, and a pool is written to after that. So what is promised is looked up first, in the
tier that decode reads from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from pdq.errors import Misconfigured, Unavailable
from pdq.kv.where import Question, Served, TierName, Tiers, Where
from pdq.settings import KvSettings

FIRST_POLL_S = 0.005
LAST_POLL_S = 0.1
KEEPALIVE_S = 1.0
"""The server closes what is idle for five seconds: a question that meets this end would count as no answer."""
SERVED_TIMEOUT_S = 0.5
TIERS_TIMEOUT_S = 3.0
WORLD_SIZE = 1
JSON = {"Content-Type": "application/json"}
"""LMCache's own routes refuse a body that does not say so."""

_encoder = msgspec.json.Encoder()
_where = msgspec.json.Decoder(Where)
_served = msgspec.json.Decoder(Served)
_tiers = msgspec.json.Decoder(Tiers)


async def tiers(host: str, http_port: int) -> Tiers:
    """The tiers of a server. Raises aiohttp.ClientError, TimeoutError or MsgspecError when it does not tell."""
    timeout = aiohttp.ClientTimeout(total=TIERS_TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{host}:{http_port}", timeout=timeout) as session:
        async with session.get("/pdq/tiers") as response:
            response.raise_for_status()
            return _tiers.decode(await response.read())


class Cutting(msgspec.Struct, frozen=True):
    """What a server's `/status` says of its keys."""

    chunk_size: int
    hash_algorithm: str


class Prefetch(msgspec.Struct, frozen=True):
    """What a server says of a prompt that it brings near. A chunk has a key for each rank and group of layers."""

    status: str
    request_id: str = ""
    chunks: int = 0
    found_keys: int = 0
    total_keys: int = 0


_prefetch = msgspec.json.Decoder(Prefetch)
_cutting = msgspec.json.Decoder(Cutting)


class Tier:
    """A worker's own LMCache server, and what lies below it. Opens its session on first use; close it with `close`."""

    def __init__(self, kv: KvSettings, model: str) -> None:
        self._url = f"http://{kv.host}:{kv.http_port}"
        self._model = model
        self._session: aiohttp.ClientSession | None = None
        self.read: TierName = "l2" if kv.mode == "pool" else "l1"
        """The tier that other workers read from: the pool, or the server's own memory."""

    async def where(self, tokens: Sequence[int], salt: str) -> Where:
        """Which tier holds how much of a prompt. Bounded by the server's own bounds; the caller has one too.

        Raises aiohttp.ClientError when the server does not answer, or knows no engine of this model.
        """
        question = Question(model=self._model, world_size=WORLD_SIZE, salt=salt, tokens=list(tokens))
        return _where.decode(await self._call("POST", "/pdq/where", _encoder.encode(question)))

    async def held(self, tokens: Sequence[int], salt: str, timeout_s: float) -> int:
        """Leading chunks of `tokens` that one tier holds under `salt`; 0 when the server does not say in time."""
        try:
            async with asyncio.timeout(timeout_s):
                where = await self.where(tokens, salt)
        except (TimeoutError, aiohttp.ClientError):
            return 0
        return max(where.near, where.far or 0)

    async def lacks(self, tokens: Sequence[int], salt: str, timeout_s: float) -> str:
        """Why other workers cannot read every whole chunk of `tokens` under `salt`; empty once they can.

        Asks again while some are missing. `store_late`: the pool has not got them within `timeout_s`. `store_failed`:
        the pool is away or did not take them, memory had no room, or the server does not answer, or knows no engine
        of this model.
        """
        try:
            async with asyncio.timeout(timeout_s):
                pause_s = FIRST_POLL_S
                while not self._readable(where := await self.where(tokens, salt)):
                    if self.read == "l2" and (where.far is None or where.not_taken):
                        return "store_failed"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LAST_POLL_S)
                return ""
        except TimeoutError:
            return "store_late" if self.read == "l2" else "store_failed"
        except aiohttp.ClientError:
            return "store_failed"

    async def stage(self, tokens: Sequence[int], salt: str, timeout_s: float) -> int:
        """Bring leading chunks of `tokens` from lower tiers into the server's own memory, as far as they are there.

        Returns how many are in memory then; 0 when the server does not load them in time.
        """
        body = {"model_name": self._model, "world_size": WORLD_SIZE, "token_ids": list(tokens), "cache_salt": salt}
        try:
            async with asyncio.timeout(timeout_s):
                begun = _prefetch.decode(await self._call("POST", "/cache/prefetches", _encoder.encode(body)))
                found, pause_s = begun, FIRST_POLL_S
                while found.status in ("submitted", "pending"):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LAST_POLL_S)
                    found = _prefetch.decode(await self._call("GET", f"/cache/prefetches/{begun.request_id}"))
        except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError):
            return 0
        return begun.chunks * found.found_keys // found.total_keys if found.total_keys else 0

    async def served(self, request: str) -> Served | None:
        """Which tier a lookup was served from; None when the server does not know it any more, or not say soon.

        request: the engine core's own name of it.
        """
        try:
            async with asyncio.timeout(SERVED_TIMEOUT_S):
                return _served.decode(await self._call("GET", f"/pdq/lookups/{request}"))
        except (TimeoutError, aiohttp.ClientError):
            return None

    async def wait_up(self) -> None:
        """Return once the server answers that it is healthy. The caller bounds the wait."""
        while True:
            try:
                await self._call("GET", "/healthcheck")
                return
            except aiohttp.ClientError:
                await asyncio.sleep(LAST_POLL_S)

    async def check_fits(self, chunk_tokens: int, hash_algorithm: str, version: str) -> None:
        """Refuse a server that names chunks otherwise than this worker, or is another LMCache: nothing would be found.

        Raises Misconfigured, saying what differs, and Unavailable when the server does not answer.
        """
        try:
            status = _cutting.decode(await self._call("GET", "/status"))
            served: str = msgspec.json.decode(await self._call("GET", "/version"), type=str)
        except (aiohttp.ClientError, msgspec.MsgspecError) as exc:
            raise Unavailable(f"the LMCache server at {self._url} does not say how it cuts chunks: {exc}") from exc
        has = (status.chunk_size, status.hash_algorithm, served.partition("-")[0])
        wants = (chunk_tokens, hash_algorithm, version.partition("-")[0])
        names = ("chunks of {} tokens", "hash {}", "LMCache {}")
        differing = [name.format(value) for name, value, want in zip(names, has, wants, strict=True) if value != want]
        if differing:
            needed = ", ".join(name.format(want) for name, want in zip(names, wants, strict=True))
            raise Misconfigured(
                f"the LMCache server at {self._url} has {', '.join(differing)}; this worker needs {needed}"
            )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _readable(self, where: Where) -> bool:
        held = where.far if self.read == "l2" else where.near
        return held == where.chunks

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        if self._session is None:
            connector = aiohttp.TCPConnector(keepalive_timeout=KEEPALIVE_S)
            self._session = aiohttp.ClientSession(self._url, connector=connector)
        async with self._session.request(method, path, data=body, headers=JSON) as response:
            response.raise_for_status()
            return await response.read()
