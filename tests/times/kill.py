"""From the SIGKILL of a service with work in its hands to the next sign of that work, by one that stood by."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.messages import Event

from tests.stack import MODEL, Service, Stack, completion
from tests.times.report import Row, Tell, Tick
from tests.times.request import Live, asked, reading, state
from tests.times.stacks import CHUNK_PROFILE, TOKEN_PROFILE, chunk_s, connected, in_thread, stack

ACK_WAITS_S = (2.0, 5.0)
SHORT, LONG = 48, 1_000
"""Tokens of a prompt, of which the long one takes the prefill engine about a second."""
MOST_TRIES = 20
ASKS_AGAIN_S = 0.2
"""How long a router may take to ask for more."""
POLL_S = 0.002


class Twins(NamedTuple):
    """A stack with two services of each role: one has the work, and the other stands by."""

    bus: Bus
    client: Client
    ack_wait_s: float
    services: dict[str, Service]

    async def kill(self, name: str) -> float:
        """SIGKILL; returns when that was."""
        at = time.time()
        await in_thread(self.services[name].kill)
        return at

    async def start_again(self, name: str) -> None:
        self.services[name].start()
        await in_thread(self.services[name].wait_ready)


async def decode(twins: Twins) -> list[float]:
    """In mid-answer, at a random moment between two signs of life that its worker gives to the broker."""
    async with asked(twins.client, _body(SHORT, 3_000), model=MODEL, order="decode-only") as live:
        await live.until_tokens(10)
        await asyncio.sleep(random.uniform(0.0, twins.ack_wait_s / 3))
        owner = live.state.decode.owner
        at = await twins.kill(owner)
        claimed = await _claimed_again(live, "decode")
        times = [claimed - at, await live.next_tokens(claimed) - at]
    await twins.start_again(owner)
    return times


async def prefill(twins: Twins) -> list[float]:
    """In the middle of a prompt."""
    async with asked(twins.client, _body(LONG, 3_000), model=MODEL, order="prefill-first") as live:
        await live.when(state("claim"))
        await asyncio.sleep(random.uniform(0.0, chunk_s(CHUNK_PROFILE, LONG)))
        assert live.story[-1] == "claim", live.story
        owner = live.state.prefill.owner
        at = await twins.kill(owner)
        times = [await _claimed_again(live, "prefill") - at, await live.when(state("prefilled")) - at]
    await twins.start_again(owner)
    return times


async def router(twins: Twins) -> list[float]:
    """With a submit in its hands that it has not routed, since it was stopped before it came."""
    name = random.choice(["router-0", "router-1"])
    process = twins.services[name].process
    assert process is not None
    for _ in range(MOST_TRIES):
        process.send_signal(signal.SIGSTOP)
        async with reading(twins.client) as live:
            body = _body(SHORT, 1)
            await twins.client.submit(body, model=MODEL, request=live.request, order="decode-only")
            if await _in_stopped_hands(twins.bus, live):
                at = await twins.kill(name)
                times = [await live.when(state("routed")) - at]
                await twins.start_again(name)
                return times
            # It was the other one's turn, or this one was stopped before it had asked for work.
            process.send_signal(signal.SIGCONT)
            await live.until(lambda live=live: live.terminal)  # type: ignore[misc]
            await asyncio.sleep(ASKS_AGAIN_S)
    raise AssertionError(f"{name} was given nothing in {MOST_TRIES} tries")


async def _in_stopped_hands(bus: Bus, live: Live) -> bool:
    """Whether a router has been given the submit that does nothing about it."""
    while not live.story:
        info = await bus.consumer_info(subjects.SUBMIT, subjects.ROUTER_CONSUMER)
        if info is not None and info["num_ack_pending"]:
            await asyncio.sleep(0.2)
            return not live.story
        await asyncio.sleep(POLL_S)
    return False


async def _claimed_again(live: Live, stage: str) -> float:
    def again(event: Event) -> bool:
        found = event.state
        return found is not None and found.event == "claim" and bool(getattr(found, stage).attempt == 2)

    return await live.when(again)


def _body(prompt: int, max_tokens: int) -> bytes:
    ids = [random.randrange(2_048) for _ in range(prompt)]
    return completion(ids, max_tokens=max_tokens, ignore_eos=True, temperature=0)


Kill = Callable[[Twins], Awaitable[list[float]]]
"""Kill one, and give the time of each row in seconds."""
ROLES: dict[Kill, tuple[str, dict[str, str]]] = {
    decode: ("decode, in mid-answer", {"kill to next claim": "", "kill to next token": ""}),
    prefill: (
        "prefill, in mid-prompt",
        {"kill to next claim": "", "kill to prefilled": "the prompt's own time is part of it"},
    ),
    router: ("router, a submit in its hands", {"kill to routed": ""}),
}
"""By what is killed: the place, and each row with its note."""


async def measure(directory: Path, repeats: int, tell: Tell, tick: Tick) -> None:
    for ack_wait_s in ACK_WAITS_S:
        with stack(directory / f"kill-{ack_wait_s:g}", ack_wait_s) as made:
            services = dict(_services(made))
            async with connected(made) as (bus, client):
                twins = Twins(bus, client, ack_wait_s, services)
                for kill, (place, rows) in ROLES.items():
                    await _role(twins, kill, place, rows, repeats, tell, tick)


async def _role(
    twins: Twins, kill: Kill, place: str, rows: dict[str, str], repeats: int, tell: Tell, tick: Tick
) -> None:
    times = []
    for _ in range(repeats):
        tick(f"kill of {place}, ack wait {twins.ack_wait_s:g} s")
        times.append(await kill(twins))
    for (what, note), values in zip(rows.items(), zip(*times, strict=True), strict=True):
        tell(Row(what=what, place=place, values_s=list(values), note=note, ack_wait_s=twins.ack_wait_s))


def _services(made: Stack) -> list[tuple[str, Service]]:
    profiles = {"router": "instant", "prefill": CHUNK_PROFILE, "decode": TOKEN_PROFILE}
    return [
        (f"{role}-{number}", made.add(f"pdq_{role}", PDQ_WORKER_ID=f"{role}-{number}", PDQ_ENGINE_SIM_PROFILE=profile))
        for role, profile in profiles.items()
        for number in range(2)
    ]
