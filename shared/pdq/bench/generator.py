"""Loads like those of public traces, made anew: the traces themselves are not part of pdq.

Each is fitted by moments (docs/bench.md has how well): log-normal lengths with the trace's mean and deviation, kept
within its extremes; arrivals whose rate changes; and, for Mooncake, prompts that go on from earlier ones.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Literal

import msgspec

from pdq.bench.workload import BLOCK_TOKENS, TimedRequest, bursty

TRIES = 20
"""Earlier prompts that are looked at for one that is long enough."""

Name = Literal["azure-code", "azure-conv", "mooncake"]


class LogNormal(msgspec.Struct, frozen=True):
    """Tokens: whole numbers from `least` to `most`, of a log-normal distribution with this mean and deviation."""

    mean: float
    std: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        sigma_2 = math.log1p((self.std / self.mean) ** 2)
        drawn = random.lognormvariate(math.log(self.mean) - sigma_2 / 2, math.sqrt(sigma_2))
        return min(self.most, max(self.least, round(drawn)))


class Sharing(msgspec.Struct, frozen=True):
    """A tree of prefixes: all prompts begin with one block; a share of them goes on from one of the last `window`
    prompts, with which it has about `shared` of its blocks in common."""

    share: float
    shared: float
    window: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """`rate`: requests a second. `slot_s`, `variation`: as of `bursty`."""

    rate: float
    slot_s: float
    variation: float
    input: LogNormal
    output: LogNormal
    sharing: Sharing | None = None


PROFILES: dict[Name, Profile] = {
    "azure-code": Profile(
        rate=2.567,
        slot_s=30.0,
        variation=2.75,
        input=LogNormal(2047.8, 1973.8, 3, 7437),
        output=LogNormal(27.9, 59.9, 6, 1899),
    ),
    "azure-conv": Profile(
        rate=5.530,
        slot_s=120.0,
        variation=0.052,
        input=LogNormal(1154.7, 1108.8, 2, 14_050),
        output=LogNormal(211.1, 162.9, 7, 1000),
    ),
    "mooncake": Profile(
        rate=3.401,
        slot_s=10.0,
        variation=0.035,
        input=LogNormal(12_035.0, 15_800.0, 891, 126_195),
        output=LogNormal(342.6, 249.9, 1, 2000),
        sharing=Sharing(0.51, 0.71, 1000),
    ),
}
"""Of Azure's 2023 traces and of Mooncake's conversation trace."""


def generate(name: Name, random: Random, rate: float = 0.0) -> Iterator[TimedRequest]:
    """Requests without end. `rate`: another mean rate than the trace's; slots keep as many requests."""
    profile = PROFILES[name]
    slot_s = profile.slot_s * profile.rate / (rate or profile.rate)
    times = bursty(rate or profile.rate, slot_s, profile.variation, random)
    return timed(name, times, random)


def timed(name: Name, times: Iterator[float], random: Random) -> Iterator[TimedRequest]:
    """Requests of a profile's lengths and prefixes, at other times than its own."""
    profile = PROFILES[name]
    tree = _Tree(profile.sharing, random) if profile.sharing is not None else None
    for at_s in times:
        num_input, num_output = profile.input.draw(random), profile.output.draw(random)
        blocks = tree.grow(num_input) if tree is not None else ()
        yield TimedRequest(at_s=at_s, input_tokens=num_input, output_tokens=num_output, blocks=blocks)


class _Tree:
    """Prompts as paths of blocks, which begin alike."""

    def __init__(self, sharing: Sharing, random: Random) -> None:
        self._sharing = sharing
        self._random = random
        self._recent: deque[tuple[int, ...]] = deque([(0,)], maxlen=sharing.window)
        self._new = itertools.count(1)

    def grow(self, num_tokens: int) -> tuple[int, ...]:
        """The blocks of one more prompt."""
        length = -(-num_tokens // BLOCK_TOKENS)
        prefix = self._prefix(length)
        blocks = (*prefix, *itertools.islice(self._new, length - len(prefix)))
        self._recent.append(blocks)
        return blocks

    def _prefix(self, length: int) -> tuple[int, ...]:
        if self._random.random() >= self._sharing.share:
            return (0,)
        shared = self._sharing.shared
        wanted = max(1, round(length * self._random.betavariate(4 * shared, 4 * (1 - shared))))
        found: tuple[int, ...] = (0,)
        for _ in range(TRIES):
            candidate = self._random.choice(self._recent)[:wanted]
            found = max(found, candidate, key=len)
            if len(found) == wanted:
                break
        return found
