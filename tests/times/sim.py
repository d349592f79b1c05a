"""Cancels on the sim engine, whose steps take a known time."""

from __future__ import annotations

from pathlib import Path

from tests.stack import MODEL
from tests.times import cancel
from tests.times.engine import add_watched
from tests.times.report import Tell, Tick
from tests.times.stacks import CHUNK_PROFILE, TOKEN_PROFILE, TOKEN_S, chunk_s, connected, stack

LONG_PROMPT = 3_900
ACK_WAIT_S = 30.0


async def measure(directory: Path, repeats: int, tell: Tell, tick: Tick) -> None:
    with stack(directory / "cancel", ACK_WAIT_S) as made:
        made.add("pdq_router")
        prefill = add_watched(made, "pdq_prefill", PDQ_ENGINE_SIM_PROFILE=CHUNK_PROFILE)
        decode = add_watched(made, "pdq_decode", PDQ_ENGINE_SIM_PROFILE=TOKEN_PROFILE, PDQ_WORKER_SLOTS="1")
        async with connected(made) as (bus, client):
            bench = cancel.Bench(
                bus,
                client,
                MODEL,
                prefill,
                decode,
                vocabulary=2_048,
                long_prompt=LONG_PROMPT,
                context=4_096,
                chunk_s=chunk_s(CHUNK_PROFILE, LONG_PROMPT),
                chunk_is="at most",
                token_s=TOKEN_S,
                repeats=repeats,
                tell=tell,
                tick=tick,
            )
            await cancel.queued(bench)
            await cancel.running(bench)
