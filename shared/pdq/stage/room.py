"""Back-pressure from decode to prefill: KV that waits for decode must fit into the tier it waits in.

Prefill that runs far ahead of decode fills the tier with KV that is evicted before it is loaded: work done
twice. So a prefill worker takes no new job while the handoffs that wait, at the mean size of its own, need
more than `room_bytes`.
"""

from __future__ import annotations

import asyncio
import time

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Unavailable
from pdq.messages import LANES

FRESH_S = 0.2
FEW, SLACK = 4, 0.5
"""Who found so much of the room free asks again only after a few handoffs: a worker that gets a job now and then would
ask for each."""
WEIGHT = 0.1
"""Share of the newest handoff in the running mean."""


class Room:
    def __init__(self, bus: Bus, model: str, room_bytes: int) -> None:
        self._bus = bus
        self._consumers = [subjects.consumer(model, lane) for lane in LANES]
        self._room_bytes = room_bytes
        self._mean_bytes = 0.0
        self._asked_at = -FRESH_S
        self._found = 0
        """Handoffs that wait, as the broker said last."""
        self._made = FEW
        """Handoffs made here since."""

    def stored(self, num_bytes: int, *, waits: bool = True) -> None:
        """Take a prefill and the size of its KV into account.

        waits: it was handed off. One that decode waits for already lies in nobody's way: it counts as 0, so that the
        mean is that of a waiting decode job, of which some come without KV.
        """
        size = num_bytes if waits else 0
        self._mean_bytes += (size - self._mean_bytes) * (WEIGHT if self._mean_bytes else 1.0)
        self._made += waits

    async def wait(self) -> None:
        """Return once the waiting handoffs leave room. A broker that does not answer holds up nobody here:
        then there is nothing to pull either."""
        pause = FRESH_S
        while True:
            if await self._fits():
                return
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 1.2)

    async def _fits(self) -> bool:
        if not self._mean_bytes or self._known_to_fit():
            return True
        try:
            infos = await asyncio.gather(*(self._bus.consumer_info(subjects.DECODE, name) for name in self._consumers))
        except Unavailable:
            return True
        self._asked_at = time.monotonic()
        self._found = sum(int(info["num_pending"]) for info in infos if info is not None)
        self._made = 0
        return self._room_for(self._found)

    def _known_to_fit(self) -> bool:
        """Without asking: as of the broker's last word, and what was made here since."""
        if time.monotonic() - self._asked_at < FRESH_S:
            return self._room_for(self._found + self._made)
        return self._made < FEW and (self._found + FEW) * self._mean_bytes < SLACK * self._room_bytes

    def _room_for(self, waiting: int) -> bool:
        # One handoff may always wait, or a prompt larger than the room would never be prefilled.
        return waiting < 1 or waiting * self._mean_bytes < self._room_bytes
