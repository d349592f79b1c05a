"""From a cancel, or a deadline, to the end that the reader sees and to an idle engine, at each place of a request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.settings import EngineSettings

from tests.stack import completion
from tests.times.engine import Watched
from tests.times.report import Row, Tell, Tick, shown
from tests.times.request import PATIENCE_S, Live, asked, ended

ROUTED = ["accepted", "routed"]
PREFILLED = [*ROUTED, "claim", "prefilled"]
SHORT = 48
"""Tokens of a prompt that takes no time to speak of; at least one chunk of KV."""
BUDGET = EngineSettings().max_num_batched_tokens
UNTOUCHED = "no engine ever has it"


class Bench(NamedTuple):
    """A running stack. Tokens: `long_prompt`, and `context` for prompt and answer together."""

    bus: Bus
    client: Client
    model: str
    prefill: Watched
    decode: Watched
    vocabulary: int
    long_prompt: int
    context: int
    chunk_s: float
    """Of one engine step on the long prompt, `chunk_is`: `at most`, or `on average`."""
    chunk_is: str
    token_s: float
    repeats: int
    tell: Tell
    tick: Tick

    def asked(
        self, prompt: int, order: str, *, deadline_s: float | None = None
    ) -> contextlib.AbstractAsyncContextManager[Live]:
        """A request whose prompt, of that many tokens, no other request has; its answer is long."""
        ids = [random.randrange(300, self.vocabulary) for _ in range(prompt)]
        body = completion(ids, max_tokens=self.context - prompt, ignore_eos=True, temperature=0)
        return asked(self.client, body, model=self.model, order=order, deadline_s=deadline_s)

    def row(self, what: str, place: str, values: list[float], note: str) -> None:
        self.tell(Row(what=what, place=place, values_s=values, note=note))


async def queued(bench: Bench) -> None:
    """All places in which a request waits: no engine has it, so it is over when its reader sees its end."""
    async with held(bench.bus, subjects.SUBMIT, subjects.ROUTER_CONSUMER):
        await _queued(bench, "queued for the router", "prefill-first", [])
    async with held(bench.bus, subjects.PREFILL, subjects.consumer(bench.model, "normal")):
        await _queued(bench, "queued for prefill", "prefill-first", ROUTED)
    # The only slot of decode is another's.
    async with bench.asked(SHORT, "decode-only") as other:
        await other.until_tokens(1)
        await _queued(bench, "between the stages", "prefill-first", PREFILLED)
    async with held(bench.bus, subjects.DECODE, subjects.consumer(bench.model, "normal")):
        await _queued(bench, "queued for decode", "decode-only", ROUTED)


class Place(NamedTuple):
    """Where an engine has the request. stop: waits for a moment, ends the request, and returns when that was.
    deadline_s: it ends by itself."""

    name: str
    worker: Watched
    prompt: int
    order: str
    stop: Callable[[Live], Awaitable[float]]
    note: str
    deadline_s: float | None = None


async def running(bench: Bench) -> None:
    """All places in which an engine has the request: over when that engine is idle."""

    async def in_prefill(live: Live) -> float:
        await bench.prefill.until_busy(PATIENCE_S)
        # One chunk may be over by now, and the last must not have begun.
        await asyncio.sleep(random.uniform(0.0, (bench.long_prompt // BUDGET - 2) * bench.chunk_s / 2))
        return await _cancel(bench, live)

    async def decoding(live: Live) -> float:
        await live.until_tokens(5)
        await asyncio.sleep(random.uniform(0.0, bench.token_s))
        return await _cancel(bench, live)

    async def until_deadline(live: Live) -> float:
        await live.until_tokens(5)
        return float(live.state.deadline)

    chunk = f"an engine step on this prompt takes {shown(bench.chunk_s)} {bench.chunk_is}"
    token = f"an engine step takes {shown(bench.token_s)}"
    deadline_s = 1.0 + 40 * bench.token_s
    for place in (
        Place("in prefill", bench.prefill, bench.long_prompt, "prefill-first", in_prefill, chunk),
        Place("decoding", bench.decode, SHORT, "decode-only", decoding, token),
        Place("decoding", bench.decode, SHORT, "decode-only", until_deadline, token, deadline_s),
    ):
        await _running(bench, place)


async def _queued(bench: Bench, place: str, order: str, story: list[str]) -> None:
    values = []
    for _ in range(bench.repeats):
        bench.tick(f"cancel {place}")
        async with bench.asked(SHORT, order) as live:
            await live.until(lambda live=live: live.story == story)  # type: ignore[misc]
            await asyncio.sleep(random.uniform(0.0, 0.1))
            at = await _cancel(bench, live)
            values.append(await live.when(ended) - at)
        assert live.story == [*story, "cancelled"], live.story
    bench.row("cancel to end", place, values, UNTOUCHED)


async def _running(bench: Bench, place: Place) -> None:
    idle, end = [], []
    cause, event = ("cancel", "cancelled") if place.deadline_s is None else ("deadline", "expired")
    for _ in range(bench.repeats):
        bench.tick(f"{cause} {place.name}")
        async with bench.asked(place.prompt, place.order, deadline_s=place.deadline_s) as live:
            at = await place.stop(live)
            end.append(await live.when(ended) - at)
            idle.append(await place.worker.idle_after(at, PATIENCE_S) - at)
        assert live.terminal == [event], live.story
    bench.row(f"{cause} to engine idle", place.name, idle, place.note)
    bench.row(f"{cause} to end", place.name, end, "")


async def _cancel(bench: Bench, live: Live) -> float:
    at = time.time()
    await bench.client.cancel(live.request)
    return at


@contextlib.asynccontextmanager
async def held(bus: Bus, stream: str, consumer: str) -> AsyncIterator[None]:
    """Workers are there, but get nothing of this queue."""
    until = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
    await bus.api(f"CONSUMER.PAUSE.{stream}.{consumer}", {"pause_until": until})
    try:
        yield
    finally:
        await bus.api(f"CONSUMER.PAUSE.{stream}.{consumer}", {})
