"""Saving an answer's KV while it is made: each chunk as it fills, one store at a time, beside the decoding."""

from __future__ import annotations

import asyncio
from types import TracebackType

import msgspec

from pdq.engines.base import Work
from pdq.engines.sim_kv import Loaded
from pdq.engines.sim_model import STATE_BYTES
from pdq.engines.sim_tier import Tier


class Saver:
    """Of one decode; a context around it, which ends once all whole chunks are stored, or the tier has refused them.

    As in a real engine the KV of the last token made is not there yet: nobody has computed with it.
    """

    def __init__(self, tier: Tier, work: Work, loaded: Loaded, chunk_tokens: int) -> None:
        """loaded: what was not computed here; nothing of that is stored again."""
        self._tier = tier
        self._work = work
        self._chunk = chunk_tokens
        self._computed_from = loaded.tokens
        self._stored = loaded.chunks
        self._tokens = list(work.prompt)
        self._states = bytearray()
        self._full = asyncio.Event()
        self._over = False
        self._saving: asyncio.Task[None] | None = None

    def made(self, token: int, states: bytearray) -> None:
        """`token` was made. `states`: those after each token computed here, that one's included; they may grow."""
        self._states = states
        if len(self._tokens) // self._chunk > self._stored:
            self._full.set()
        self._tokens.append(token)

    async def __aenter__(self) -> None:
        self._saving = asyncio.create_task(self._save())

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        assert self._saving is not None
        self._over = True
        self._full.set()
        if kind is not None:
            self._saving.cancel()
        await asyncio.gather(self._saving, return_exceptions=True)

    async def _save(self) -> None:
        while not self._over:
            await self._full.wait()
            self._full.clear()
            await self._store()
        await self._store()

    async def _store(self) -> None:
        known = self._tokens[:-1]
        if len(known) // self._chunk <= self._stored:
            return
        begin = (self._stored * self._chunk - self._computed_from) * STATE_BYTES
        work = msgspec.structs.replace(self._work, prompt=tuple(known))
        stored = await self._tier.store(work, Loaded(chunks=self._stored), bytes(self._states[begin:]))
        if not stored.cause:
            self._stored = stored.tokens // self._chunk
