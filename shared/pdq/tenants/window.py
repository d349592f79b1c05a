"""A sum over the last minute."""

from __future__ import annotations

LENGTH_S = 60


class Window:
    """Amounts of the last 60 seconds, in slots of one: what counts is never less than what was added in that time, so
    no 60 seconds hold more than a limit that is checked against it. (A token bucket, which fills while it is used, lets
    twice as much through in its first minute.) Times are seconds of a clock that does not go back."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        """Amount by second, oldest first."""
        self._total = 0

    def add(self, amount: int, at: float) -> None:
        self._total += amount
        self._slots[int(at)] = self._slots.get(int(at), 0) + amount

    def change(self, amount: int, at: float) -> None:
        """Correct what was added at a time; where that has left the window nothing changes."""
        if int(at) in self._slots:
            self.add(amount, at)

    def total(self, now: float) -> int:
        while self._slots and (oldest := next(iter(self._slots))) + LENGTH_S + 1 <= now:
            self._total -= self._slots.pop(oldest)
        return self._total

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Seconds until one more amount is within a limit, if nothing else comes; 0: it is now. `amount` <= `limit`."""
        left = self.total(now) + amount - limit
        wait = 0.0
        for second, added in self._slots.items():
            if left <= 0:
                break
            left -= added
            wait = second + LENGTH_S + 1 - now
        return wait
