"""What the sim engine itself costs: it is part of pdq's path here, and not of the floor."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdq.engines.base import Engine, Work
from pdq.engines.factory import create
from pdq.messages import Sampling
from pdq.settings import EngineSettings, KvSettings, load_models

from tests.bench.paths import NUM_TOKENS, PROMPT


async def cpu_ms(directory: Path, repeats: int) -> dict[str, float]:
    """CPU milliseconds of one prefill and of one decode, in this process, engine alone."""
    models = directory / "models.toml"
    kv_dir = directory / "engine-kv"
    kv_dir.mkdir()
    settings = EngineSettings(kind="sim", sim_kv_dir=str(kv_dir))
    engine = create(load_models(models).one(""), "both", settings, KvSettings())
    await engine.start()
    try:
        # Once before, so that the KV is there, as it is in the benchmark from the second request on.
        await _prefill(engine)
        return {
            "prefill": await _cpu_ms(lambda: _prefill(engine), repeats),
            "decode": await _cpu_ms(lambda: _decode(engine), repeats),
        }
    finally:
        await engine.close()


async def _prefill(engine: Engine) -> None:
    await engine.prefill(_work())


async def _decode(engine: Engine) -> None:
    async for _ in engine.decode(_work()):
        pass


def _work() -> Work:
    sampling = Sampling(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0)
    return Work(request="bench", prompt=tuple(PROMPT.encode()), sampling=sampling, salt="")


async def _cpu_ms(work: Callable[[], Awaitable[None]], repeats: int) -> float:
    began = time.process_time()
    for _ in range(repeats):
        await work()
    return (time.process_time() - began) / repeats * 1e3
