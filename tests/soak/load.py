"""What is asked, window by window, and how much of it the sim engines could take. Pure: all from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean
from typing import Literal, NamedTuple, get_args

import msgspec
from pdq.client import idempotent_id
from pdq.engines import sim_timing

from tests.chaos import plan
from tests.chaos.plan import TENANTS, Ask
from tests.chaos.reference import prompt, reference

CHUNK_TOKENS = 32
WINDOW_S = 10.0
SAMPLE = 400
"""Requests that the means are taken of."""

BadKind = Literal["unreadable", "refused", "taken", "job"]
BAD_SHARE = 0.06
"""Bad requests for each good one, over all kinds."""


class Bad(NamedTuple):
    """One request that can only fail (see `bad`). `at_s`: seconds after its window's begin."""

    kind: BadKind
    tenant: str
    at_s: float


class Workers(NamedTuple):
    """One stage's workers: how many, the slots of each, and their engine's profile."""

    number: int
    slots: int
    profile: str


class Capacity(NamedTuple):
    """Requests of this mix that each stage could take, a second. The less of them is what the stack can take."""

    prefill: float
    decode: float

    @property
    def rate(self) -> float:
        return min(self)


def asks(seed: int, window: int, rate: float) -> list[Ask]:
    """The good requests of one window, `rate` a second; `at_s` counts from the window's begin."""
    planned = plan.make(seed * 1_000_000 + window, max(1, round(rate * WINDOW_S)), rate)
    return [_named(number, ask) for number, ask in enumerate(planned.asks)]


def _named(number: int, ask: Ask) -> Ask:
    """Every fourth is named by an idempotency key. A deadline that cannot pass is the stack's own."""
    request = idempotent_id(f"key of {ask.request}") if number % 4 == 0 else ask.request
    return msgspec.structs.replace(ask, request=request, deadline_s=ask.deadline_s if ask.may_expire else None)


def bads(seed: int, window: int, rate: float) -> list[Bad]:
    """The bad requests of one window; the share left over by rounding is made up by chance."""
    rng = random.Random(f"{seed} {window} bad")
    wanted = rate * WINDOW_S * BAD_SHARE
    count = int(wanted) + (rng.random() < wanted % 1)
    return [Bad(rng.choice(get_args(BadKind)), rng.choice(TENANTS), rng.uniform(0, WINDOW_S)) for _ in range(count)]


def capacity(seed: int, prefill: Workers, decode: Workers) -> Capacity:
    """What the timing model allows, if every request runs to its end, no KV is found beforehand, and prefill computes
    every prompt of a chunk or more that does not ask for decode-only.

    Prefill computes one prompt after the other: workers / (share of prompts it computes × seconds of one).
    Decode: a request holds its slot for its tokens, each a step of the full batch, and for the prompt work of all
    that begin meanwhile, which is one for each slot; with decode-first for its prefill, too:
    workers × slots / (tokens × step + slots × prompt work + share of decode-first × seconds of a prefill).
    """
    sample = plan.make(seed, SAMPLE, 1.0).asks
    prefilled = [ask for ask in sample if _prefilled(ask)]
    prompt_s = mean(_compute_s(prefill, 0, len(prompt(ask))) for ask in prefilled)
    waiting_s = prompt_s * sum(ask.order == "decode-first" for ask in prefilled) / SAMPLE
    return Capacity(
        prefill=prefill.number / (prompt_s * len(prefilled) / SAMPLE),
        decode=decode.number * decode.slots / (_hold_s(decode, sample) + waiting_s),
    )


def _prefilled(ask: Ask) -> bool:
    return ask.order != "decode-only" and len(prompt(ask)) >= CHUNK_TOKENS


def _compute_s(workers: Workers, start: int, size: int) -> float:
    profile = sim_timing.parse(workers.profile)
    return (profile.prefill[0] + profile.prefill_ms(start, size - start)) / 1e3


def _hold_s(workers: Workers, sample: Sequence[Ask]) -> float:
    answers = [len(reference(ask).ids) for ask in sample]
    context = mean(len(prompt(ask)) + made / 2 for ask, made in zip(sample, answers, strict=True))
    step_s = sim_timing.parse(workers.profile).decode_ms(workers.slots, round(workers.slots * context)) / 1e3
    begin_s = mean(_compute_s(workers, _loaded(ask), len(prompt(ask))) for ask in sample)
    return mean(answers) * step_s + workers.slots * begin_s


def _loaded(ask: Ask) -> int:
    """Tokens of the prompt whose KV decode finds."""
    size = len(prompt(ask))
    return min(size // CHUNK_TOKENS * CHUNK_TOKENS, size - 1) if _prefilled(ask) else 0
