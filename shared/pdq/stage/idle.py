"""How long a worker has had nothing to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Idle:
    """Tells when nothing was done for a while. `busy`: how many things are being done now."""

    def __init__(self, after_s: float, busy: Callable[[], int]) -> None:
        """Count from now, and from each `changed`."""
        self.after_s = after_s
        self._busy = busy
        self._since = time.monotonic()

    def changed(self) -> None:
        """A job was taken, or is done."""
        self._since = time.monotonic()

    async def over(self) -> None:
        """Return once `busy` was 0 for `after_s`; it is at that moment. Waits without bound."""
        while True:
            left_s = self._left_s()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    def _left_s(self) -> float:
        if self._busy():
            return self.after_s
        return self._since + self.after_s - time.monotonic()
