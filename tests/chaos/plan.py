"""What a run asks and what befalls it, all of it from one seed. Pure: the same seed gives the same plan."""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec
from pdq.messages import PRIORITIES, Priority

ROLES = {"router": 2, "prefill": 3, "decode": 3}
"""Processes of each role."""
TENANTS = ("red", "blue")
VOCABULARY = 2048
CHUNK = 32
LONG_DEADLINE_S = 3_000.0
ORDERS = ("prefill-first", "prefill-first", "decode-first", "decode-first", "decode-only", "auto")
"""A request asks for one of them."""

ProcessFault = Literal["kill", "pause", "drain"]
NetworkFault = Literal["cut", "silent", "delay"]
FaultKind = Literal["kill", "pause", "drain", "cut", "silent", "delay", "broker"]

ONE_IN: dict[FaultKind, int] = {
    "kill": 6,
    "pause": 25,
    "drain": 25,
    "cut": 15,
    "silent": 40,
    "delay": 15,
    "broker": 100,
}
"""Requests for each fault of a kind."""
LASTS_S: dict[FaultKind, tuple[float, float]] = {
    "kill": (0.0, 1.5),
    "pause": (0.3, 5.0),
    "drain": (0.0, 1.0),
    "cut": (0.1, 4.0),
    "silent": (0.5, 5.0),
    "delay": (1.0, 5.0),
    "broker": (0.1, 2.5),
}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, and what its client does besides waiting. Times: seconds after `at_s`, None: never."""

    request: str
    tenant: str
    at_s: float
    """Seconds after the start of the run."""
    shape: Literal["ids", "text", "chat"]
    prompt: tuple[int, ...]
    """Token ids; of `text` and `chat` the bytes of the text."""
    fields: dict[str, Any]
    """The body's other fields, in the names of completions."""
    priority: Priority
    order: str
    deadline_s: float | None
    cancel_s: float | None
    again_s: float | None
    """Submitted once more, under the same id."""
    leave_s: float | None
    """The reader leaves, and resumes after the last event it has seen."""

    @property
    def may_expire(self) -> bool:
        return self.deadline_s is not None and self.deadline_s < LONG_DEADLINE_S


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Something bad. `target`: `<role>-<number>`, `client-<tenant>` or `broker`; `strength` 0..1 says how bad."""

    at_s: float
    kind: FaultKind
    target: str
    lasts_s: float
    strength: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    span_s: float
    """Requests are submitted, and faults begin, within so many seconds."""
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def make(seed: int, requests: int, rate: float, trouble: float = 1.0) -> Plan:
    """A plan of `requests` requests, `rate` a second; `trouble`: how many times the usual number of faults."""
    span_s = requests / rate
    # Apart, so that a change to one of them leaves the other as it is.
    asking, breaking = random.Random(f"{seed} asks"), random.Random(f"{seed} faults")
    asks = sorted((_ask(asking, seed, number, span_s) for number in range(requests)), key=lambda ask: ask.at_s)
    faults = [
        _fault(breaking, kind, span_s)
        for kind, one_in in ONE_IN.items()
        for _ in range(max(1, round(requests * trouble / one_in)))
    ]
    faults.sort(key=lambda fault: fault.at_s)
    return Plan(seed=seed, span_s=span_s, asks=tuple(asks), faults=tuple(faults))


def nodes() -> list[str]:
    return [f"{role}-{number}" for role, count in ROLES.items() for number in range(count)]


def clients() -> list[str]:
    return [f"client-{tenant}" for tenant in TENANTS]


def _fault(rng: random.Random, kind: FaultKind, span_s: float) -> Fault:
    if kind == "broker":
        targets = ["broker"]
    else:
        targets = nodes() + (clients() if kind in ("cut", "silent", "delay") else [])
    return Fault(
        at_s=round(rng.uniform(0.0, span_s), 3),
        kind=kind,
        target=rng.choice(targets),
        lasts_s=round(rng.uniform(*LASTS_S[kind]), 3),
        strength=round(rng.random(), 3),
    )


def _ask(rng: random.Random, seed: int, number: int, span_s: float) -> Ask:
    shape: Literal["ids", "text", "chat"] = rng.choice(("ids", "ids", "text", "chat"))
    return Ask(
        request=f"c{seed:x}-{number:05d}",
        tenant=rng.choice(TENANTS),
        at_s=round(rng.uniform(0.0, span_s), 3),
        shape=shape,
        prompt=_prompt(rng, shape),
        fields=_fields(rng),
        priority=rng.choice(PRIORITIES),
        order=rng.choice(ORDERS),
        deadline_s=_deadline_s(rng),
        cancel_s=_maybe(rng, 0.12, 2.0),
        again_s=_maybe(rng, 0.1, 4.0),
        leave_s=_maybe(rng, 0.2, 1.5),
    )


def _deadline_s(rng: random.Random) -> float | None:
    """Mostly none, or one that cannot pass; in one of twenty one that may."""
    kind, short = rng.random(), round(rng.uniform(0.5, 4.0), 3)
    return short if kind < 0.05 else LONG_DEADLINE_S if kind < 0.35 else None


def _maybe(rng: random.Random, share: float, most_s: float) -> float | None:
    at_s = round(rng.uniform(0.0, most_s), 3)
    return at_s if rng.random() < share else None


def _prompt(rng: random.Random, shape: str) -> tuple[int, ...]:
    """Half of them share their beginning with others, so that some KV is found there already; of these, half share all
    whole chunks, as a chat's next turn does: they prefer a worker."""
    size = rng.choice((12, 40, 100, 250, 500)) + rng.randrange(12)
    shared = random.Random(rng.randrange(3)) if rng.random() < 0.5 else rng
    known = size // CHUNK * CHUNK if size % 2 else size * 2 // 3
    most = VOCABULARY if shape == "ids" else 127
    # Text is printable ASCII: one id per character, and nothing a chat or JSON would change.
    least = 0 if shape == "ids" else 32
    head = [shared.randrange(least, most) for _ in range(known)]
    return tuple(head + [rng.randrange(least, most) for _ in range(size - known)])


def _fields(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": 1 if rng.random() < 0.08 else rng.randrange(8, 160)}
    if rng.random() < 0.6:
        fields["ignore_eos"] = True
    if rng.random() < 0.4:
        fields["temperature"] = 0
    if rng.random() < 0.25:
        fields["logprobs"] = rng.randrange(4)
    if rng.random() < 0.2:
        fields |= _with_state(rng, fields["max_tokens"])
    return fields


def _with_state(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Fields that carry state over the output: a second attempt has to run it again."""
    kind = rng.randrange(4)
    if kind == 0:
        return {"presence_penalty": 0.5}
    if kind == 1:
        # Syllables of the sim's words: some answers hold one, others hold text back for one again and again.
        return {"stop": [rng.choice(("bada", "kiso", "mune", "te\n")), rng.choice("bdfgk") + "a" + rng.choice("lmnp")]}
    if kind == 2:
        return {"min_tokens": min(max_tokens, rng.randrange(1, 40))}
    return {"seed": rng.randrange(2**31), "temperature": 0.8}
