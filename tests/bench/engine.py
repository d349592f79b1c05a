"""What the sim engine itself costs, and takes: it is part of pdq's path here, and not of the floor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from pdq.engines.base import Engine, Tokens, Work
from pdq.engines.factory import create
from pdq.messages import Sampling
from pdq.settings import EngineSettings, KvSettings, load_models

from tests.bench.memory import kv_directory
from tests.bench.paths import NUM_TOKENS, PROMPT, other_prompt
from tests.bench.stats import percentile


class Alone(NamedTuple):
    """Seconds of a request in the engine, with nothing before, between or after its stages."""

    first_s: float
    end_s: float


async def cpu_ms(directory: Path, repeats: int) -> dict[str, float]:
    """CPU milliseconds of one prefill and of one decode, in this process, engine alone."""
    async with _engine(directory, "instant") as engine:
        # Once before, so that the KV is there, as it is in the benchmark from the second request on.
        await engine.prefill(_work(PROMPT))
        return {
            "prefill": await _cpu_ms(lambda: engine.prefill(_work(PROMPT)), repeats),
            "decode": await _cpu_ms(lambda: _decode(engine, PROMPT), repeats),
        }


async def alone(directory: Path, profile: str, repeats: int) -> Alone:
    """What a request whose prompt is new takes, one at a time: medians."""
    async with _engine(directory, profile) as engine:
        times = [await _timed(engine, other_prompt(f"r-{number:020d}")) for number in range(repeats)]
    return Alone(*(percentile(each, 0.5) for each in zip(*times, strict=True)))


@contextlib.asynccontextmanager
async def _engine(directory: Path, profile: str) -> AsyncIterator[Engine]:
    with kv_directory(directory) as kv:
        settings = EngineSettings(kind="sim", sim_kv_dir=kv, sim_profile=profile)
        engine = create(load_models(directory / "models.toml").one(""), "both", settings, KvSettings())
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def _timed(engine: Engine, prompt: str) -> tuple[float, float]:
    began, first_s = time.perf_counter(), 0.0
    await engine.prefill(_work(prompt))
    async for item in engine.decode(_work(prompt)):
        if isinstance(item, Tokens):
            first_s = first_s or time.perf_counter() - began
    return first_s, time.perf_counter() - began


async def _decode(engine: Engine, prompt: str) -> None:
    async for _ in engine.decode(_work(prompt)):
        pass


def _work(prompt: str) -> Work:
    sampling = Sampling(max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, temperature=0.0)
    return Work(request="bench", prompt=tuple(prompt.encode()), sampling=sampling, salt="")


async def _cpu_ms(work: Callable[[], Awaitable[object]], repeats: int) -> float:
    began = time.process_time()
    for _ in range(repeats):
        await work()
    return (time.process_time() - began) / repeats * 1e3
