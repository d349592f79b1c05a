"""Who may go: requests on their way to the hub, in the order in which the site stored them."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Iterator

RETRY_S = 0.25
"""Nobody goes for so long after a failure. Short: work must flow soon after the uplink is back."""


class Place:
    """A request in the line, until it has arrived or is given back."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.go = asyncio.Event()


class Window:
    """The first `size` of the line may be under way at once.

    It begins at 1, doubles with each that arrives, to at most `most`, and is 1 again after any failure: then the first
    goes alone, as often as it takes, and nobody overtakes it who was not under way already.
    """

    def __init__(self, most: int) -> None:
        self.size = 1
        self._most = most
        self._line: list[Place] = []
        self._paused = False
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Wait until one more could go at once: what cannot is better left in the queue, for any forwarder."""
        while self._paused or len(self._line) >= self.size:
            self._changed.clear()
            await self._changed.wait()

    @contextlib.contextmanager
    def place(self, seq: int) -> Iterator[Place]:
        """A place in the line, by sequence, for the length of a `with`."""
        place = Place(seq)
        bisect.insort(self._line, place, key=lambda each: each.seq)
        try:
            yield place
        finally:
            self._line.remove(place)
            self._release()

    async def turn(self, place: Place) -> None:
        """Wait until it may go, for the first time or again."""
        place.go.clear()
        self._release()
        await place.go.wait()

    def arrived(self) -> None:
        if not self._paused:
            self.size = min(self._most, 2 * self.size)

    def failed(self) -> None:
        self.size = 1
        if not self._paused:
            self._paused = True
            asyncio.get_running_loop().call_later(RETRY_S, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._release()

    def _release(self) -> None:
        """Those whose turn it is, in their order."""
        if not self._paused:
            for place in self._line[: self.size]:
                place.go.set()
            self._changed.set()
