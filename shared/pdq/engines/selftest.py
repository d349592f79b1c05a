"""What an engine proves before it counts as ready: a token with logprobs, and a chunk stored and loaded again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from pdq.engines.base import Done, Engine, Work
from pdq.errors import Unavailable
from pdq.messages import Sampling

POLL_S = 0.02


async def prove(engine: Engine, forget: Callable[[], Awaitable[bool]]) -> None:
    """Run the path once. `forget` empties the engine's own prefix cache, so that the load comes from the tier;
    it returns False while blocks are in use. Raises Unavailable, saying what failed. The caller bounds it.
    """
    chunk = engine.info.chunk_tokens
    work = Work(
        request="self-test",
        prompt=tuple(secrets.randbelow(engine.info.vocab_size) for _ in range(chunk + 1)),
        sampling=Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1),
        salt=secrets.token_hex(32),
    )
    stored = await engine.prefill(work)
    if stored.stored_tokens != chunk:
        raise Unavailable(f"self-test: a chunk of KV could not be stored ({stored.cause})")
    while True:
        if await forget():
            break
        await asyncio.sleep(POLL_S)
    done = [item async for item in engine.decode(work) if isinstance(item, Done)]
    if not done or done[0].loaded_tokens != chunk:
        raise Unavailable("self-test: a stored chunk of KV could not be loaded again")
