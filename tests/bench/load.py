"""A constant load, open loop: each request is sent when it is due, whatever has become of those before it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import nats.errors
from pdq.errors import PdqError

from tests.bench.paths import Branch


class Answer(NamedTuple):
    """Seconds from when a request was due."""

    first_s: float
    end_s: float


class Offered(NamedTuple):
    """What became of a load. took_s: from when the first request was due to the last end."""

    answers: list[Answer]
    failed: list[str]
    took_s: float


async def offer(path: Branch, rate: float, seconds: float) -> Offered:
    """That many requests a second; returns once each has ended, or failed as it does by itself: a full queue's refusal
    is one failure, of the floor's client, which has nats-py's errors, as of pdq's."""
    clock, answers, failed = asyncio.get_running_loop().time, list[Answer](), list[str]()
    began = clock()

    async def one(due: float) -> None:
        try:
            timing = await path.request()
        except (AssertionError, TimeoutError, PdqError, nats.errors.Error) as exc:
            failed.append(f"{type(exc).__name__}: {exc}"[:200])
        else:
            end_s = clock() - due
            answers.append(Answer(end_s - timing.end_s + timing.first_s, end_s))

    async with asyncio.TaskGroup() as group:
        for number in range(round(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - clock()))
            group.create_task(one(due))
    return Offered(answers, failed, clock() - began)
