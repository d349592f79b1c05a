"""How fast something grows. Pure.

Samples are first put into windows of equal length, of which the median counts: a garbage collector's saw-tooth and
single peaks vanish. A line is then fitted through the medians by least squares. That is stricter than a median of
slopes (Theil-Sen), which does not see memory that grows in a few large steps, as allocators make it grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression, median, pstdev

import msgspec

MOST_WINDOWS = 60
TEN_MINUTES_S = 600.0


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """`first`, `last`: medians of the first and the last window, in the unit of the samples. `error`: the standard
    error of `per_10_min`, which tells how far it is to be believed."""

    first: float
    last: float
    per_10_min: float
    error: float


def growth(samples: Sequence[tuple[float, float]]) -> Growth:
    """samples: (seconds, value), in order. Raises ValueError for fewer than two windows' worth."""
    points = windows(samples, min(MOST_WINDOWS, len(samples) // 2))
    if len(points) < 2:
        raise ValueError(f"{len(samples)} samples are too few to tell a growth")
    times, values = [at for at, _ in points], [value for _, value in points]
    slope, at_0 = linear_regression(times, values)
    off = [value - slope * at - at_0 for at, value in points]
    error = pstdev(off) / pstdev(times) / len(points) ** 0.5
    return Growth(
        first=values[0], last=values[-1], per_10_min=slope * TEN_MINUTES_S, error=round(error * TEN_MINUTES_S, 3)
    )


def windows(samples: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """The median time and value of each of `count` windows of equal length; a window without samples is left out."""
    if not samples or count < 1:
        return []
    begin, length = samples[0][0], (samples[-1][0] - samples[0][0]) / count or 1.0
    parts: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for at, value in samples:
        parts[min(int((at - begin) / length), count - 1)].append((at, value))
    return [(median(at for at, _ in part), median(value for _, value in part)) for part in parts if part]
