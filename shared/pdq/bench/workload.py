"""What a load asks for, and when: pure data, so that the same load can be put on several targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from random import Random

import msgspec

from pdq.errors import Rejected

BLOCK_TOKENS = 512
"""Of a shared prefix: what one of `blocks` stands for, as in Mooncake's traces."""


class TimedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Lengths are tokens. `blocks`: ids of the prompt's blocks of `BLOCK_TOKENS`; the same id is the same
    text. Empty: a prompt that shares nothing."""

    at_s: float
    """When it is due, after the load begins."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


Load = Sequence[TimedRequest]


def alike(times: Iterable[float], input_tokens: int, output_tokens: int) -> Iterator[TimedRequest]:
    """Requests of the same lengths."""
    return (TimedRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens) for at_s in times)


def constant(rate: float) -> Iterator[float]:
    """Seconds at which requests are due: evenly, the first at 0."""
    return (number / rate for number in itertools.count())


def poisson(rate: float, random: Random) -> Iterator[float]:
    """Seconds: a Poisson process, the first at 0. Gaps are exponential, with a mean of 1 / rate."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += random.expovariate(rate)


def bursty(rate: float, slot_s: float, variation: float, random: Random) -> Iterator[float]:
    """Seconds: a Poisson process whose own rate changes every `slot_s`, drawn from a gamma distribution.

    variation: of the rates, as variance by squared mean. Requests in windows of `slot_s` are then dispersed (variance
    by mean) by about 1 + 2/3 · rate · slot_s · variation; 0 is a Poisson process.
    """
    for slot in itertools.count():
        now = rate * (random.gammavariate(1 / variation, variation) if variation else 1.0)
        at_s = random.expovariate(now) if now > 0 else slot_s
        while at_s < slot_s:
            yield slot * slot_s + at_s
            at_s += random.expovariate(now)


def within(load: Iterable[TimedRequest], *, warm_up_s: float, duration_s: float, requests: int) -> list[TimedRequest]:
    """What is due in the warm-up and for `duration_s` after it, and at most so many requests after it; 0: no limit."""
    found: list[TimedRequest] = []
    counted = 0
    for request in load:
        if duration_s and request.at_s >= warm_up_s + duration_s:
            break
        counted += request.at_s >= warm_up_s
        if requests and counted > requests:
            break
        found.append(request)
    return found


def faster(load: Load, factor: float) -> list[TimedRequest]:
    """The same requests, `factor` times as fast."""
    return [msgspec.structs.replace(request, at_s=request.at_s / factor) for request in load]


def checked(load: Load, warm_up_s: float) -> Load:
    """Raises Rejected for a load that measures nothing."""
    if not any(request.at_s >= warm_up_s for request in load):
        raise Rejected("there is no request to measure: the load ends with its warm-up", code="usage", param="warm-up")
    return load
