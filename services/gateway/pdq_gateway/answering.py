"""The answer of choices that are routed: whole, or as a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdq_gateway.ask import Ask
from pdq_gateway.errors import failed
from pdq_gateway.following import Following, Heard
from pdq_gateway.gateway import Gateway
from pdq_gateway.naming import Place
from pdq_gateway.progress import Choice, Step, usage_of
from pdq_gateway.reply import DONE, KEEP_ALIVE, Reply, event
from pdq_gateway.shapes import Head, Shape

GRACE_S = 30.0
"""An end may come so much later than the deadline."""

Steps = Sequence[tuple[Choice, Step]]


def head_of(gateway: Gateway, ask: Ask, shape: Shape, choice: Choice) -> Head:
    """By what the log tells of the first choice: any gateway says the same."""
    state = choice.state
    assert state is not None
    spec = gateway.models.find(state.model)
    return Head(
        id=ask.name.public(shape.prefix),
        created=int(state.submitted),
        model=spec.id if spec is not None else state.model,
        include_usage=ask.include_usage,
    )


class Patience:
    """What comes of choices that are routed, for as long as they may take."""

    def __init__(self, logs: Following, choices: Sequence[Choice], keep_alive_s: float) -> None:
        self._logs = logs
        self._keep_alive_s = keep_alive_s
        self._give_up = time.monotonic() + max(map(_lasts_s, choices)) + GRACE_S

    async def next(self) -> list[Heard]:
        """What comes next; nothing where a stream should show that it lives. Raises Failed past the deadline."""
        if time.monotonic() > self._give_up:
            raise failed("deadline_exceeded", "the request has not ended by its deadline")
        return await self._logs.next(self._keep_alive_s)


class Answer:
    """`choices` have been routed; `logs` tells what comes after."""

    def __init__(self, gateway: Gateway, ask: Ask, shape: Shape, choices: Sequence[Choice], logs: Following) -> None:
        self._ask = ask
        self._shape = shape
        self._choices = choices
        self._patience = Patience(logs, choices, gateway.settings.keep_alive_s)
        self._head = head_of(gateway, ask, shape, choices[0])
        self._at = list(ask.after.seqs) if ask.after is not None else [0] * len(choices)
        """Per choice the log's sequence of what the client has by now."""

    @property
    def _ended(self) -> bool:
        return all(choice.ended for choice in self._choices)

    async def whole(self, reply: Reply, rest: Sequence[Heard]) -> None:
        """Raises Failed when a choice ends otherwise than with its answer."""
        heard = list(rest)
        while True:
            for index, found in heard:
                self._choices[index].take(found)
            if self._ended:
                break
            heard = await self._patience.next()
        await reply.whole(self._shape.whole(self._head, self._choices, usage_of(self._choices)))

    async def stream(self, reply: Reply, steps: Steps, rest: Sequence[Heard]) -> None:
        """Raises as `whole`; what came before is sent by then."""
        await reply.begin_stream()
        frames = [self._frame(choice, step) for choice, step in steps]
        heard = list(rest)
        while True:
            try:
                for index, found in heard:
                    choice = self._choices[index]
                    frames.append(self._frame(choice, choice.take(found)))
            except BaseException:
                await reply.stream(b"".join(frames))
                raise
            if self._ended:
                break
            if any(frames):
                await reply.stream(b"".join(frames))
            frames = []
            while not (heard := await self._patience.next()):
                await reply.stream(KEEP_ALIVE)
        await reply.end_stream(b"".join(frames) + self._usage() + DONE)

    def _frame(self, choice: Choice, step: Step) -> bytes:
        """A chunk as an event of the stream; empty where there is none, or the client has it."""
        if step.seq <= self._at[choice.index]:
            return b""
        self._at[choice.index] = step.seq
        chunk = self._shape.chunk(self._head, choice.index, step)
        return event(chunk, self._place()) if chunk is not None else b""

    def _usage(self) -> bytes:
        after = self._ask.after
        if not self._ask.include_usage or (after is not None and after.end):
            return b""
        return event(self._shape.usage(self._head, usage_of(self._choices)), self._place(end=True))

    def _place(self, end: bool = False) -> str:
        return str(Place(tuple(self._at), end)) if self._ask.resumable else ""


def _lasts_s(choice: Choice) -> float:
    state = choice.state
    return max(0.0, state.deadline - state.submitted) if state is not None else 0.0
