"""The highest rate that is sustained: raised in steps until it is not, then halved in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

UP = 1.3
"""Factor of a step."""
MOST_STEPS = 10
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
    """From `start` up or down in steps to the edge, then into it; bounded."""
    trials = [await attempt(start)]
    up = trials[0].sustained
    while len(trials) < MOST_STEPS and trials[-1].sustained == up:
        trials.append(await attempt(trials[-1].rate * (UP if up else 1 / UP)))
    if trials[-1].sustained != up:
        low, high = sorted(trial.rate for trial in trials[-2:])
        for _ in range(HALVINGS):
            trials.append(await attempt((low * high) ** 0.5))
            low, high = (trials[-1].rate, high) if trials[-1].sustained else (low, trials[-1].rate)
    return _found(trials)


def _found(trials: list[Trial]) -> Saturation:
    within = [trial.rate for trial in trials if trial.sustained]
    over = [trial for trial in trials if not trial.sustained]
    limit = min(over, key=lambda trial: trial.rate).limit if over else "not reached"
    return Saturation(max(within, default=0.0), limit, trials)
