"""What one request puts on the wire, in bytes: learnt from pdq's path, and given to the floor.

A connection that subscribes to `pdq.>` sees every publish of a request, since streams store what is
published to plain subjects.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec
from pdq.bus import Bus
from pdq.bus.wire import Message

NUM_STATES = 6
"""`accepted`, `routed`, prefill's claim, `prefilled`, decode's claim, `finished`."""


class Shape(msgspec.Struct):
    """Payload sizes of one request's messages, in the order they are published."""

    submit: int = 0
    prefill_job: int = 0
    decode_job: int = 0
    states: list[int] = []
    outs: list[int] = []

    @property
    def whole(self) -> bool:
        return bool(self.submit and self.prefill_job and self.decode_job and len(self.states) == NUM_STATES)


class Observer:
    """The shapes of the requests that were seen, by request id."""

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}

    def take(self, message: Message) -> None:
        match message.subject.split("."):
            case ["pdq", "submit", *_]:
                self._of(message.headers.get("Pdq-Request", "")).submit = len(message.data)
            case ["pdq", "log", _, request, "state"]:
                self._of(request).states.append(len(message.data))
            case ["pdq", "log", _, request, "out"]:
                self._of(request).outs.append(len(message.data))
            case ["pdq", "prefill", _, _, _, request]:
                self._of(request).prefill_job = len(message.data)
            case ["pdq", "decode", _, _, _, request]:
                self._of(request).decode_job = len(message.data)

    def typical(self) -> Shape:
        """The shape with the median number of token batches. Raises when no request was seen whole."""
        whole = sorted((shape for shape in self.shapes.values() if shape.whole), key=lambda shape: len(shape.outs))
        if not whole:
            raise AssertionError(f"no request was seen whole: {list(self.shapes.values())[:3]}")
        return whole[len(whole) // 2]

    def _of(self, request: str) -> Shape:
        return self.shapes.setdefault(request, Shape())


@contextlib.asynccontextmanager
async def observed(bus: Bus) -> AsyncIterator[Observer]:
    """Watch all requests for the length of a `with`."""
    observer = Observer()
    subscription = await bus.subscribe("pdq.>", observer.take)
    try:
        yield observer
        await bus.flush()
    finally:
        await bus.unsubscribe(subscription)
