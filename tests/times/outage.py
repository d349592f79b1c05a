"""From the moment that a killed broker accepts connections again to the next token, and to a new request's first."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from pdq.client import Client

from tests.stack import MODEL, Stack, completion
from tests.times.report import Row, Tell, Tick
from tests.times.request import asked, reading
from tests.times.stacks import TOKEN_PROFILE, connected, in_thread, stack

AWAY_S = 2.0
ACK_WAIT_S = 30.0
"""The default."""
PLACE = f"broker killed, {AWAY_S:g} s away"


async def measure(directory: Path, repeats: int, tell: Tell, tick: Tick) -> None:
    with stack(directory / "outage", ACK_WAIT_S, TOKEN_PROFILE) as made:
        for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
            made.add(module)
        async with connected(made) as (_, client):
            times = []
            for _ in range(repeats):
                tick(PLACE)
                times.append(await _once(made, client))
    next_token, first_token = zip(*times, strict=True)
    tell(Row(what="broker back to next token", place=PLACE, values_s=list(next_token), note="of a running answer"))
    note = "of a request submitted then; prefill and decode included"
    tell(Row(what="broker back to first token", place=PLACE, values_s=list(first_token), note=note))


async def _once(made: Stack, client: Client) -> tuple[float, float]:
    async with asked(client, _body(3_000), model=MODEL) as running, reading(client) as new:
        await running.until_tokens(10)
        await asyncio.sleep(random.uniform(0.0, 0.5))
        await in_thread(made.broker.kill)
        await asyncio.sleep(AWAY_S)
        await in_thread(made.broker.start)
        back = time.time()
        await client.submit(_body(5), model=MODEL, request=new.request)
        times = await running.next_tokens(back) - back, await new.next_tokens(back) - back
        await new.until(lambda: new.terminal)
    return times


def _body(max_tokens: int) -> bytes:
    ids = [random.randrange(2_048) for _ in range(64)]
    return completion(ids, max_tokens=max_tokens, ignore_eos=True, temperature=0)
