"""The step loop: continuous batching of all requests that run in a simulated engine.

Each step gives every decoding request one token, and what is left of its token budget to prompts, oldest
first (chunked prefill), but no prompt more than half the budget while others run: a long one does not hold up a
short one behind it. A prompt's last chunk also makes its first token. A step takes
`decode_ms(batch, kv_tokens)` if it decodes, plus `prefill_ms` of its chunks, plus prefill's constant when a
prompt begins in it. A request that leaves has no part in the next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pdq.engines.base import Tokens
from pdq.engines.budget import most_of_one_prompt
from pdq.engines.sim_model import Generation, advance
from pdq.engines.sim_timing import PROFILES, Profile

Emit = Callable[["Running", Tokens], None]

TURN_S = 0.0005
"""Steps that take no time are made for so long before others have their turn: a turn costs more than a step."""


class Running:
    """One request in the loop, which has `position` tokens behind it and `state` after them.

    Without a `generation` it is a prefill: its prompt is computed and no token made. `emit` gets each token
    as it is made. `states` collects the state after each token, prompt and answer, that was computed here. `done`
    resolves once no more steps are needed.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        position: int,
        state: bytes,
        generation: Generation | None = None,
        emit: Emit = lambda running, tokens: None,
    ) -> None:
        self.position = position
        self.begun = False
        self.states = bytearray()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._prompt = prompt
        self._state = state
        self._generation = generation
        self._emit = emit

    @property
    def remaining(self) -> int:
        """Prompt tokens still to compute; at or below 0 it decodes."""
        return len(self._prompt) - self.position

    def compute(self, count: int) -> None:
        """Take in the next `count` tokens of the prompt."""
        for token in self._prompt[self.position : self.position + count]:
            self._state = advance(self._state, token)
            self.states += self._state
        self.position += count
        self.begun = True

    def advance(self) -> None:
        """With the prompt computed: make and emit one token; finish on the last, or where none is wanted."""
        if self._generation is not None:
            tokens = self._generation.step(self._state)
            self._state = advance(self._state, tokens.ids[0])
            self.states += self._state
            self.position += 1
            self._emit(self, tokens)
        if self._generation is None or self._generation.finish:
            self.finish()

    def finish(self, error: Exception | None = None) -> None:
        """Resolve `done`; the first call counts."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class StepLoop:
    """Steps while anything runs, sleeps otherwise. `token_budget` bounds the tokens of one step."""

    def __init__(self, profile: Profile, token_budget: int) -> None:
        self._profile = profile
        self._timeless = profile is PROFILES["instant"]
        self._budget = token_budget
        self._running: list[Running] = []
        self._work = asyncio.Event()

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that the running requests hold."""
        return sum(running.position for running in self._running)

    async def complete(self, running: Running) -> None:
        """Run a request to its end. Cancelled, it leaves at once."""
        self._running.append(running)
        self._work.set()
        try:
            await running.done
        finally:
            self.drop(running)

    def drop(self, running: Running) -> None:
        """No more steps for this request; its `done` stays as it is."""
        if running in self._running:
            self._running.remove(running)

    def clear(self) -> None:
        """No more steps for any request."""
        self._running.clear()

    async def run(self) -> None:
        """Step until cancelled."""
        clock = asyncio.get_running_loop().time
        free_at = clock()
        turn = time.perf_counter()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
                free_at, turn = clock(), time.perf_counter()
            decoding, chunks = self._plan()
            wait_s = 0.0
            if not self._timeless:
                free_at += self._step_ms(decoding, chunks) / 1e3
                wait_s = max(0.0, free_at - clock())
            if wait_s or time.perf_counter() - turn > TURN_S:
                await asyncio.sleep(wait_s)
                turn = time.perf_counter()
            self._apply(decoding, chunks)
            if self._timeless and len(self._running) == 1:
                self._go_on(self._running[0], turn + TURN_S)

    def _go_on(self, running: Running, until: float) -> None:
        """Steps of the only request that there is, for the rest of the turn: they take no time, and need no plan."""
        if running.remaining > 0:
            return
        while running in self._running and time.perf_counter() < until:
            running.advance()
            if running.done.done():
                self.drop(running)

    def _plan(self) -> tuple[list[Running], list[tuple[Running, int]]]:
        decoding = [running for running in self._running if running.remaining <= 0]
        if len(decoding) == len(self._running):
            return decoding, []
        left = max(1, self._budget - len(decoding))
        most = left if len(self._running) == 1 else most_of_one_prompt(self._budget)
        chunks = []
        for running in self._running:
            if running.remaining > 0 and left > 0:
                chunks.append((running, min(left, most, running.remaining)))
                left -= chunks[-1][1]
        return decoding, chunks

    def _step_ms(self, decoding: list[Running], chunks: list[tuple[Running, int]]) -> float:
        total = 0.0
        if chunks:
            total = sum(self._profile.prefill_ms(running.position, count) for running, count in chunks)
            if any(not running.begun for running, _ in chunks):
                total += self._profile.prefill[0]
        if decoding:
            total += self._profile.decode_ms(len(decoding), sum([running.position for running in decoding]))
        return total

    def _apply(self, decoding: list[Running], chunks: list[tuple[Running, int]]) -> None:
        for running, count in chunks:
            if running in self._running:
                running.compute(count)
        for running in decoding + [running for running, _ in chunks if running.remaining <= 0]:
            if running in self._running:
                running.advance()
            if running.done.done():
                self.drop(running)
