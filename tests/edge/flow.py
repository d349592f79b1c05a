"""How long after the uplink is back a request that waited at the site has its first token there."""

from __future__ import annotations

import asyncio
import random
import time

from pdq.messages import Event

from tests.edge.outage import Tick
from tests.edge.report import Flow
from tests.edge.scene import Breakable, Noting, Scene
from tests.stack import MODEL, completion

AWAY_S = (1.0, 15.0)
BOUND_S = 120.0


async def flow(scene: Scene, what: Breakable, repeats: int, rng: random.Random, tick: Tick) -> Flow:
    """Again and again: break it, submit, mend it after 1 to 15 s."""
    result = Flow(what=what)
    async with scene.client() as client:
        for number in range(repeats):
            tick(f"{what}, until work flows", number)
            away_s = round(rng.uniform(*AWAY_S), 1)
            accepted_s, first_s = await _once(scene, what, client, f"flow-{what.replace(' ', '-')}-{number}", away_s)
            result.away_s.append(away_s)
            result.accepted_s.append(accepted_s)
            result.first_token_s.append(first_s)
    return result


async def _once(scene: Scene, what: Breakable, client: Noting, request: str, away_s: float) -> tuple[float, float]:
    """From the moment that it is back: to the hub's acceptance, and to the first token at the site's reader. Seconds;
    each service has its own clock, of one machine here."""
    breaking = asyncio.create_task(scene.break_for(what, away_s))
    # What was on its way when it broke would not have waited.
    await asyncio.sleep(0.5)
    async with client.follow(request, catch_up=False) as follower:
        body = completion("hello", max_tokens=8, ignore_eos=True, temperature=0)
        await client.submit(body, model=MODEL, request=request)
        assert not breaking.done(), "the site's queue took the request only when the hub was back"
        await breaking
        back = time.time()
        seen = list[tuple[float, Event]]()
        async for event in follower.events(BOUND_S):
            seen.append((time.time(), event))
    accepted = next(event.state.at for _, event in seen if event.state is not None)
    return accepted - back, next(at for at, event in seen if event.out is not None) - back
