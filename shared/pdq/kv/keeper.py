"""Keeps an LMCache server together with its Redis.

LMCache's Redis client connects once, when it is made. One that was made before Redis was there, or that lost its
connections since, finds and stores nothing for ever after, and says so to nobody; so does one to which Redis once said
that it is full; and a Redis that hangs holds up every lookup. So a connection of our own watches it: when Redis goes,
LMCache's is taken away (lookups go on without), and when it is back, or a store has failed, LMCache gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from pdq.errors import Misconfigured, Unavailable
from pdq.kv.pool import Credentials

ANSWER_S = 2.0
"""A Redis that does not answer within this counts as gone."""
PING_S = 2.0
RETRY_S = 1.0
DETACH_S = 10.0

log = logging.getLogger("pdq.kv")


class Redis(NamedTuple):
    host: str
    port: int
    credentials: Credentials

    async def check(self, wait_s: float) -> None:
        """Return once it answers. Raises Misconfigured when it refuses the password, Unavailable after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    with contextlib.suppress(OSError, TimeoutError):
                        async with self.connected():
                            return
                    await asyncio.sleep(RETRY_S)
        except TimeoutError as exc:
            raise Unavailable(f"Redis at {self.host}:{self.port} did not answer within {wait_s:g} s") from exc

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Callable[[], Any]]:
        """A connection, for the length of a `with`: yields what waits PING_S and asks it for a sign of life.

        Raises OSError or TimeoutError when there is none, or it is lost, and Misconfigured.
        """
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(self.host, self.port)

        async def ask(*words: str) -> str:
            writer.write(_encoded(words))
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                answer = await reader.readline()
            if not answer:
                raise ConnectionResetError
            return answer.decode("utf-8", "replace").strip()

        async def watch() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await reader.read(1)  # nothing comes unasked but the end
                    raise ConnectionResetError
            await ask("PING")

        try:
            await self._log_in(ask)
            yield watch
        finally:
            writer.close()

    async def _log_in(self, ask: Any) -> None:
        user, password, _ = self.credentials
        answer = await ask("AUTH", *filter(None, (user, password))) if password else ""
        if answer in ("", "+OK"):
            answer = await ask("PING")
        if answer.startswith("-") and not answer.startswith("-LOADING"):
            raise Misconfigured(f"Redis at {self.host}:{self.port} refuses PDQ_KV_POOL_USER, _PASSWORD: {answer[1:]}")


def _encoded(words: tuple[str, ...]) -> bytes:
    parts = [word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class Keeper:
    """See the module. `run` it for as long as the server runs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._taken: list[Any] = []
        """Configurations of the adapters that were taken away."""

    async def run(self, storage: Any) -> None:
        """storage: LMCache's storage manager, whose lower tier is this Redis. Runs until it is cancelled."""
        while True:
            try:
                async with self._redis.connected() as watch:
                    # At the first time too: Redis may have been restarted since LMCache connected.
                    await asyncio.to_thread(self._renew, storage)
                    while True:
                        await watch()
                        if _stores_fail(storage):
                            log.warning("Redis answers, but did not take what was to be stored; connecting anew")
                            await asyncio.to_thread(self._renew, storage)
            except (OSError, TimeoutError, RuntimeError, Misconfigured) as exc:
                if not self._taken:
                    log.warning("the pool is away, KV is computed anew: %s", str(exc) or type(exc).__name__)
                await asyncio.to_thread(self._take_away, storage)
            await asyncio.sleep(RETRY_S)

    def _renew(self, storage: Any) -> None:
        self._take_away(storage)
        for config in self._taken:
            storage.add_l2_adapter(config)
        self._taken.clear()

    def _take_away(self, storage: Any) -> None:
        for about, _ in storage.l2_adapters():
            if about.config not in self._taken:
                self._taken.append(about.config)
            # One that hangs stays until its last transfer has ended; it is asked for nothing more.
            with contextlib.suppress(TimeoutError):
                storage.delete_l2_adapter(about.index, timeout=DETACH_S)


def _stores_fail(storage: Any) -> bool:
    # A `SealedTier` counts; to name it here would import LMCache before settings are checked.
    return any(getattr(tier, "num_failed", 0) for _, tier in storage.l2_adapters())
