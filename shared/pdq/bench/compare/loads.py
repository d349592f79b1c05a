"""What is asked of every set-up: three loads, the same requests at the same times for all of them in a round."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from random import Random
from typing import Literal

import msgspec

from pdq.bench import workload
from pdq.bench.records import Record
from pdq.bench.workload import Load, TimedRequest

Name = Literal["chats", "mixed", "short"]
Kind = Literal["chat", "long"]

CHAT_INPUT, CHAT_OUTPUT = (32, 64), 120
LONG_INPUT, LONG_OUTPUT = (1000, 1800), 8
SHORT_INPUT, SHORT_OUTPUT = (32, 64), 96
"""Tokens: from, to; and of each answer."""
FIELDS = {"temperature": 0.0, "ignore_eos": True}
"""Of every request."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples are spread evenly between whole numbers, however few they are."""
TITLES: dict[Name, str] = {
    "chats": "steady short chats alone",
    "mixed": "the same chats, and long prompts",
    "short": "many short prompts with longer answers",
}


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How dense the loads are, and how long they last after their warm-up."""

    seconds: float
    """Of `chats` and `mixed`; `short` lasts half as long."""
    warm_up_s: float
    chat_rate: float
    """Chats a second, as a Poisson process."""
    long_every_s: float
    """A long prompt each so many seconds, evenly."""
    short_rate: float
    """Requests a second of the third load, as a Poisson process."""

    def __str__(self) -> str:
        return f"{self.chat_rate:g} chats/s, a long prompt each {self.long_every_s:g} s, {self.short_rate:g} short/s"


def plan(name: Name, sizes: Sizes, seed: int) -> Load:
    """The requests of a load, in the order of their times. `mixed` has the chats of `chats`."""
    if name == "short":
        endless = _poisson(sizes.short_rate, SHORT_INPUT, SHORT_OUTPUT, Random(f"{seed} short"))
    else:
        endless = _poisson(sizes.chat_rate, CHAT_INPUT, CHAT_OUTPUT, Random(f"{seed} chats"))
    if name == "mixed":
        endless = heapq.merge(endless, _longs(sizes, Random(f"{seed} longs")), key=lambda request: request.at_s)
    seconds = sizes.seconds / 2 if name == "short" else sizes.seconds
    found = workload.within(endless, warm_up_s=sizes.warm_up_s, duration_s=seconds, requests=0)
    return workload.checked(found, sizes.warm_up_s)


def warm_up() -> Load:
    """A long prompt and two chats for each engine of a pair, before anything is measured."""
    tokens = [(LONG_INPUT[1], 2)] * 2 + [(CHAT_INPUT[1], CHAT_OUTPUT // 4)] * 4
    return [TimedRequest(at_s=0.0, input_tokens=num, output_tokens=out) for num, out in tokens]


def kind(record: Record) -> Kind:
    """What a request of a load is."""
    return "long" if record.planned_input_tokens >= LONG_INPUT[0] else "chat"


def prefill_share(load: Load) -> float:
    """Prompt tokens for each token of an answer."""
    return sum(request.input_tokens for request in load) / max(1, sum(request.output_tokens for request in load))


def _poisson(rate: float, tokens: tuple[int, int], output: int, random: Random) -> Iterator[TimedRequest]:
    for at_s in workload.poisson(rate, random):
        yield TimedRequest(at_s=at_s, input_tokens=random.randint(*tokens), output_tokens=output)


def _longs(sizes: Sizes, random: Random) -> Iterator[TimedRequest]:
    """The first comes half a gap after the warm-up. A few of them have lengths from all of the range."""
    least, most = LONG_INPUT
    place = random.random()
    for number in itertools.count():
        at_s = sizes.warm_up_s + (number + 0.5) * sizes.long_every_s
        tokens = least + int((place + number * GOLDEN) % 1 * (most - least + 1))
        yield TimedRequest(at_s=at_s, input_tokens=tokens, output_tokens=LONG_OUTPUT)
