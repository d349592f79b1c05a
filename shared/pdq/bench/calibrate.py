"""How many tokens of an endpoint's prompts are ours: measured on it, where it turns text into tokens itself."""

from __future__ import annotations

import asyncio

from pdq.bench.prompts import Prompts, Scale
from pdq.bench.target import Ask, Failed, Hearing, Target
from pdq.bench.workload import TimedRequest

PROBES = (20, 120)
"""Words."""
FIRST_NUMBER = 1 << 29
"""Of the probes' prompts: no load has so many requests."""


async def measure(target: Target, prompts: Prompts, timeout_s: float) -> Scale:
    """Send two prompts and go by the usage that comes back. Raises PdqError."""
    if target.api == "completions":
        return Scale()
    found = []
    for number, words in enumerate(PROBES, FIRST_NUMBER):
        request = TimedRequest(at_s=0.0, input_tokens=words, output_tokens=1)
        hearing = Hearing()
        try:
            async with asyncio.timeout(timeout_s):
                await target.ask(Ask(prompts.body(number, request), timeout_s), hearing)
        except TimeoutError:
            raise Failed("timeout", f"a first short prompt has no answer within {timeout_s:g} s") from None
        if not hearing.prompt_tokens:
            raise Failed("no_usage", "the endpoint does not tell how many tokens a prompt has: use --api completions")
        found.append((words, hearing.prompt_tokens))
    return Scale.through(*found)
