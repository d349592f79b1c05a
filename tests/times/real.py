"""Cancels on the real engine: one worker of both stages, with its LMCache server."""

from __future__ import annotations

import math
import random
from pathlib import Path

from pdq.client import Client
from pdq.settings import ModelSpec

from tests.e2e.conftest import KvServer, default_model, real_stack
from tests.stack import Stack, completion
from tests.times import cancel
from tests.times.engine import add_watched
from tests.times.report import Tell, Tick
from tests.times.request import Live, asked, state
from tests.times.stacks import connected

LONG_PROMPT = 1_900
NUM_TOKENS = 20


async def measure(directory: Path, repeats: int, tell: Tell, tick: Tick) -> None:
    tick("starting the engine")
    spec = default_model()
    server = KvServer(directory, spec)
    made: Stack | None = None
    try:
        await server.start()
        made = real_stack(directory, spec, server)
        made.add("pdq_router")
        worker = add_watched(made, "pdq_worker")
        worker.ready_s = 240
        async with connected(made) as (bus, client):
            chunk_s, token_s = await _steps(client, spec)
            bench = cancel.Bench(
                bus,
                client,
                spec.slug,
                prefill=worker,
                decode=worker,
                vocabulary=spec.vocab_size,
                long_prompt=LONG_PROMPT,
                context=spec.max_model_len,
                chunk_s=chunk_s,
                chunk_is="on average",
                token_s=token_s,
                repeats=repeats,
                tell=tell,
                tick=tick,
            )
            await cancel.running(bench)
    finally:
        if made is not None:
            made.stop()
        server.stop()


async def _steps(client: Client, spec: ModelSpec) -> tuple[float, float]:
    """Seconds of a step on a long prompt, on average, and of a decode step; the first request warms up."""
    for _ in range(2):
        ids = [random.randrange(300, spec.vocab_size) for _ in range(LONG_PROMPT)]
        body = completion(ids, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0)
        async with asked(client, body, model=spec.slug, order="prefill-first") as live:
            await live.until(lambda live=live: live.terminal)  # type: ignore[misc]
    prefill_s = await live.when(state("prefilled")) - await live.when(state("claim"))
    return prefill_s / math.ceil(LONG_PROMPT / cancel.BUDGET), _token_s(live)


def _token_s(live: Live) -> float:
    times = [at for at, event in zip(live.times, live.events, strict=True) if event.out is not None]
    return (times[-1] - times[0]) / (len(live.transcript.ids) - 1)
