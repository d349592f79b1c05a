"""The KV directory as the engine uses it: with faults, within bounds, reported as phases.

It is written to off the event loop, and read on it: small files that were just written take less time than a thread's
turn does.
What is moved takes the time of the disk, and of a link: an engine has one, over which stores and loads go in turns.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import suppress
from typing import NamedTuple

from pdq.engines.base import Phase, Work
from pdq.engines.sim_faults import Faults
from pdq.engines.sim_kv import KvDirectory, Loaded
from pdq.engines.sim_model import STATE_BYTES
from pdq.errors import Unavailable

Attributes = dict[str, str | int | float | bool]


class Stored(NamedTuple):
    """What of a prompt can be read: `tokens`, in whole chunks; or 0, and the cause. `phases`: `kv.store`, if any."""

    tokens: int
    cause: str = ""
    phases: tuple[Phase, ...] = ()


class Tier:
    """Loads and stores the KV of prompts. Raises nothing but cancellation: KV is a cache."""

    def __init__(
        self, directory: KvDirectory, chunk_tokens: int, faults: Faults, store_timeout_s: float, token_us: float = 0.0
    ) -> None:
        """token_us: microseconds that the link takes for the KV of one token."""
        self._directory = directory
        self._chunk = chunk_tokens
        self._faults = faults
        self._store_timeout_s = store_timeout_s
        self._token_s = token_us / 1e6
        self._link = asyncio.Lock()

    async def held(self, work: Work) -> int:
        """Tokens of the prompt's chunks that are there, damaged or not."""
        return self._chunk * len(self._directory.lookup(work.salt, work.prompt))

    async def load(self, work: Work) -> tuple[Loaded, tuple[Phase, ...]]:
        """What need not be computed of the prompt; `kv.lookup`, and `kv.load` where something was found."""
        start = time.time_ns()
        found = self._directory.lookup(work.salt, work.prompt)
        lookup = ended("kv.lookup", start, {"pdq.kv.tokens": len(found) * self._chunk})
        if not found:
            return Loaded(), (lookup,)
        start, loaded = time.time_ns(), Loaded()
        with suppress(Unavailable):
            await self._faults.before("load")
            loaded = self._directory.load(found, work.prompt)
            await self._cross(loaded.tokens)
        return loaded, (lookup, ended("kv.load", start, _amount(loaded.tokens)))

    async def store(self, work: Work, loaded: Loaded, states: bytes) -> Stored:
        """Store the whole chunks that were not loaded; `states` are those of the prompt's other tokens."""
        whole = len(work.prompt) // self._chunk
        if loaded.chunks == whole:
            return Stored(whole * self._chunk)
        start = time.time_ns()
        chunks, cause = await self._try_store(work, loaded.chunks, states)
        attributes = _amount(chunks * self._chunk)
        if cause:
            attributes["pdq.kv.cause"] = cause
        return Stored(chunks * self._chunk, cause, (ended("kv.store", start, attributes),))

    async def prove(self) -> None:
        """Store a chunk, load it and remove it, where there is a directory. Raises OSError when that fails."""
        if self._directory.present:
            await asyncio.to_thread(self._round_trip)

    async def _try_store(self, work: Work, first: int, states: bytes) -> tuple[int, str]:
        try:
            async with asyncio.timeout(self._store_timeout_s):
                await self._faults.before("store")
                await self._cross((len(work.prompt) // self._chunk - first) * self._chunk)
                stored = await asyncio.to_thread(self._directory.store, work.salt, work.prompt, states, first)
        except TimeoutError:
            return 0, "store_late"
        except (OSError, Unavailable):
            return 0, "store_failed"
        return stored, ""

    async def _cross(self, tokens: int) -> None:
        if self._token_s:
            async with self._link:
                await asyncio.sleep(tokens * self._token_s)

    def _round_trip(self) -> None:
        salt, prompt, states = f"probe {uuid.uuid4().hex}", (0,) * self._chunk, os.urandom(self._chunk * STATE_BYTES)
        self._directory.store(salt, prompt, states, 0)
        try:
            found = self._directory.lookup(salt, prompt)
            if self._directory.load(found, (*prompt, 0)).state != states[-STATE_BYTES:]:
                raise OSError("the KV directory does not give back what it was given")
        finally:
            self._directory.remove(salt, prompt)


def ended(name: str, start_ns: int, attributes: Attributes, events: tuple[tuple[str, int], ...] = ()) -> Phase:
    """A phase that ends now."""
    return Phase(name=name, start_ns=start_ns, end_ns=time.time_ns(), attributes=attributes, events=events)


def _amount(tokens: int) -> Attributes:
    return {"pdq.kv.tokens": tokens, "pdq.kv.bytes": tokens * STATE_BYTES}
