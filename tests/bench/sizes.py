"""What a request takes in the request log, for docs/operations.md: `python -m tests.bench.sizes`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client

from tests.ask import ask
from tests.stack import Stack, completion

PACES = {"llama3-8b-h100": "6 ms a token", "llama2-70b-h100-tp8": "30 ms a token"}
SHAPES = ((100, 1), (100, 200), (2_000, 200))
"""Tokens of the prompt, and of the answer."""
NUM_REQUESTS = 40


async def log_bytes(bus: Bus) -> int:
    info = await bus.stream_info(subjects.LOG)
    assert info is not None
    return int(info["state"]["bytes"])


async def measure(client: Client, bus: Bus, prompt: int, answer: int) -> float:
    """Bytes of the log per request."""
    before = await log_bytes(bus)
    bodies = [
        completion([5 + (number * 7 + place) % 200 for place in range(prompt)], max_tokens=answer, ignore_eos=True)
        for number in range(NUM_REQUESTS)
    ]
    await asyncio.gather(*(ask(client, body, seconds=120) for body in bodies))
    return (await log_bytes(bus) - before) / NUM_REQUESTS


async def at_pace(profile: str, directory: Path) -> None:
    stack = Stack(directory, PDQ_ENGINE_SIM_PROFILE=profile)
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module)
    try:
        await stack.start()
        bus = await stack.connect()
        for prompt, answer in SHAPES:
            size = await measure(Client(bus, "local"), bus, prompt, answer)
            print(f"{PACES[profile]}: {prompt} + {answer} tokens: {size:,.0f} B of log a request", flush=True)
        await bus.close()
    finally:
        stack.stop()


def main() -> None:
    for profile in PACES:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(at_pace(profile, Path(directory)))


if __name__ == "__main__":
    main()
