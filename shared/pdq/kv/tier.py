"""What the KV tier holds, asked over the LMCache server's HTTP port.

A store's own result is not enough to promise anything to decode. It says that the store ran without an error:
chunks for which the server had no room are skipped without one, and in its `lmcache_driven` mode the server
answers before the chunks can be read. So what is promised is looked up first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

FIRST_POLL_S = 0.005
LAST_POLL_S = 0.1
WORLD_SIZE = 1


class Tier:
    """One LMCache server. Opens its session on first use; close it with `close`."""

    def __init__(self, host: str, http_port: int, model: str, chunk_tokens: int) -> None:
        self._url = f"http://{host}:{http_port}"
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._session: aiohttp.ClientSession | None = None

    async def holds(self, tokens: Sequence[int], salt: str, timeout_s: float) -> bool:
        """Whether every whole chunk of `tokens` can be read under `salt`, within `timeout_s`.

        Asks again while some are missing, and brings those that lie in a lower tier up to the first.
        False also when the server does not answer, or knows no engine of this model.
        """
        try:
            async with asyncio.timeout(timeout_s):
                pause_s = FIRST_POLL_S
                while not await self._prefetch(tokens, salt):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LAST_POLL_S)
                return True
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def wait_up(self) -> None:
        """Return once the server answers that it is healthy. The caller bounds the wait."""
        while True:
            try:
                await self._call("GET", "/healthcheck")
                return
            except aiohttp.ClientError:
                await asyncio.sleep(LAST_POLL_S)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _prefetch(self, tokens: Sequence[int], salt: str) -> bool:
        body = {
            "model_name": self._model,
            "world_size": WORLD_SIZE,
            "token_ids": list(tokens),
            "cache_salt": salt,
        }
        job = await self._call("POST", "/cache/prefetches", body)
        if job["chunks"] != len(tokens) // self._chunk_tokens:
            return False
        while True:
            state = await self._call("GET", f"/cache/prefetches/{job['request_id']}")
            if state["status"] == "completed":
                return bool(state["found_keys"] == state["total_keys"])
            await asyncio.sleep(FIRST_POLL_S)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(self._url)
        async with self._session.request(method, path, json=body) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer
