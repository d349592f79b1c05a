"""The highest rate that is sustained: raised in steps until it is not, then halved in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

UP = 1.3
"""Factor of a step."""
MOST_STEPS = 10
TRIES = 2
"""Of a rate, until it is sustained."""
HALVINGS = 2
"""Once a step is not sustained: the result is then within UP ** (1 / 2 ** HALVINGS) of the true rate, 7 %."""


class Trial(msgspec.Struct, frozen=True):
    """A rate that was tried, in requests a second. cores: in use, by group of processes; limit: in words."""

    rate: float
    sustained: bool
    completed_rate: float
    added_p99_ms: float
    failed: int
    cores: dict[str, float]
    limit: str


class Saturation(msgspec.Struct, frozen=True):
    """What one path sustained: requests a second; 0 where not even the lowest rate tried was.

    limit: of the lowest rate that was not sustained. trials: in the order they were made.
    """

    sustained: float
    limit: str
    trials: list[Trial]


async def search(attempt: Callable[[float], Awaitable[Trial]], start: float) -> Saturation:
    """From `start` up or down in steps to the edge, then into it; bounded. A rate that is not sustained is tried once
    more: a machine has its moments."""
    trials: list[Trial] = []

    async def sustains(rate: float) -> bool:
        for _ in range(TRIES):
            trials.append(await attempt(rate))
            if trials[-1].sustained:
                return True
        return False

    rate, up = start, await sustains(start)
    edge = None
    for _ in range(MOST_STEPS - 1):
        before, rate = rate, rate * (UP if up else 1 / UP)
        if await sustains(rate) != up:
            edge = sorted((before, rate))
            break
    if edge is not None:
        low, high = edge
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if await sustains(middle) else (low, middle)
    return _found(trials)


def _found(trials: list[Trial]) -> Saturation:
    within = {trial.rate for trial in trials if trial.sustained}
    over = [trial for trial in trials if trial.rate not in within]
    limit = min(over, key=lambda trial: trial.rate).limit if over else "not reached"
    return Saturation(max(within, default=0.0), limit, trials)
