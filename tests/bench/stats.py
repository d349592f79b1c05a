"""Percentiles, and ratios with their spread over the rounds of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """A figure over the rounds of a run."""

    min: float
    median: float
    max: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed. Raises on no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), percentile(values, 0.5), max(values))


def ratios(values: Sequence[float], floor: Sequence[float]) -> Spread | None:
    """Each round's value over the floor's of the same round; None where the floor is too small to measure."""
    if min(floor) <= 0:
        return None
    return spread([value / least for value, least in zip(values, floor, strict=True)])
