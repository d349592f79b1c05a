"""What a run does, from its seed: the requests, where their clients leave and come back, and what dies meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from tests.stack import MODEL

ROUND = 5
"""Requests at one time."""
GATEWAYS = 2
DECODES = 2
BROKER_ONE_IN = 7
"""Rounds for each restart of the broker."""
LEAVER_TOKENS = 2_000
"""More than can be made until its client leaves."""

HELD_ONE_IN = 10
"""Requests for each whose client must not leave, as it does not ask for background."""

How = Literal["post", "get"]

SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 24} for name in ("name", "street", "city", "country")},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "news")]
FORMAT = {"type": "json_schema", "json_schema": {"name": "address", "schema": SCHEMA}}


class Return(msgspec.Struct, frozen=True):
    """How a client whose stream has ended early comes back."""

    how: How
    gateway: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One streamed request."""

    key: str
    """Its idempotency key."""
    path: Literal["/chat/completions", "/completions"]
    body: dict[str, Any]
    order: str = "prefill-first"
    gateway: int = 0
    """The first that it is asked of."""
    background: bool = True
    cuts: tuple[float, ...] = ()
    """Its client leaves and comes back once it has so much of the answer, 0 to 1; only where it goes on meanwhile."""
    leaves: int | None = None
    """Its client leaves for good with so many characters: that ends the request."""
    returns: tuple[Return, ...] = ()
    """In turn, over and over."""
    gateway_dies: float = 0.5
    """Once so much of its answer is there, 0 to 1, its gateway is killed, if it has not lost one yet."""
    decode_dies: float = 0.5
    """The same of the worker that decodes it."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    asks: tuple[Ask, ...]
    broker_dies: float | None = None
    """The same of the broker, by the mean of its requests."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    rounds: tuple[Round, ...]


def make(seed: int, requests: int) -> Plan:
    """`requests` that are resumed; every other round has one more, whose client leaves for good."""
    rng = random.Random(seed)
    broker = rng.randrange(BROKER_ONE_IN)
    return Plan(
        seed=seed,
        rounds=tuple(
            _round(rng, seed, range(first, min(first + ROUND, requests)), number % BROKER_ONE_IN == broker)
            for number, first in enumerate(range(0, requests, ROUND))
        ),
    )


def _round(rng: random.Random, seed: int, numbers: range, broker: bool) -> Round:
    asks = [_resumed(rng, seed, number) for number in numbers]
    # With the broker away for a moment, nothing tells a gateway's client that leaves from one that stays.
    if numbers.start // ROUND % 2 == 0 and not broker:
        asks.append(_leaver(rng, seed, numbers.start))
    return Round(asks=tuple(asks), broker_dies=_share(rng) if broker else None)


def _share(rng: random.Random) -> float:
    return round(rng.uniform(0.03, 0.8), 3)


def _resumed(rng: random.Random, seed: int, number: int) -> Ask:
    kind = KINDS[number % len(KINDS)]
    path, fields = kind(rng)
    # A client may only leave where its request goes on; the others are cut by their gateway's death alone.
    background = number % HELD_ONE_IN != HELD_ONE_IN - 1
    cuts = sorted(_share(rng) for _ in range(rng.randint(1, 3))) if background else []
    return Ask(
        key=f"resume {seed:x} {number}",
        path=path,
        body=_body(rng, path, fields),
        order=rng.choice(("prefill-first", "decode-only", "decode-first")),
        gateway=rng.randrange(GATEWAYS),
        background=background,
        cuts=tuple(cuts),
        returns=tuple(Return(rng.choice(("post", "get")), rng.randrange(GATEWAYS)) for _ in range(8)),
        gateway_dies=_share(rng),
        decode_dies=_share(rng),
    )


def _leaver(rng: random.Random, seed: int, number: int) -> Ask:
    fields = {"max_tokens": LEAVER_TOKENS, "ignore_eos": True, "temperature": 0}
    return Ask(
        key=f"leave {seed:x} {number}",
        path="/chat/completions",
        body=_body(rng, "/chat/completions", fields),
        gateway=rng.randrange(GATEWAYS),
        background=False,
        leaves=rng.randint(1, 200),
    )


def _body(rng: random.Random, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    text = " ".join(rng.choice(("sea", "ship", "storm", "light", "letter", "night")) for _ in range(rng.randint(4, 60)))
    text = f"{rng.randrange(10**6)} {text} {fields.pop('say', '')}".strip()
    asked: dict[str, Any] = {"prompt": text} if path == "/completions" else {"messages": [_turn(text)]}
    usage = {"stream_options": {"include_usage": True}} if rng.random() < 0.7 else {}
    return {"model": MODEL, "stream": True, **asked, **fields, **usage}


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ---- kinds of requests; all of them answer the same way twice

Kind = Callable[[random.Random], tuple[Literal["/chat/completions", "/completions"], dict[str, Any]]]


def _long(rng: random.Random) -> dict[str, Any]:
    """A long answer: of the likeliest tokens, or of a seed's (which a second attempt must run again)."""
    chosen: dict[str, Any] = (
        {"temperature": 0} if rng.random() < 0.7 else {"temperature": 0.8, "seed": rng.randrange(99)}
    )
    return {"max_tokens": rng.randint(80, 200), "ignore_eos": True, **chosen}


KINDS: tuple[Kind, ...] = (
    lambda rng: ("/chat/completions", _long(rng)),
    lambda rng: ("/completions", _long(rng) | {"n": 2}),
    lambda rng: ("/chat/completions", _long(rng) | {"logprobs": True, "top_logprobs": 2}),
    lambda rng: (
        "/chat/completions",
        {"say": "@weather and @news", "tools": TOOLS, "max_tokens": 900, "temperature": 0},
    ),
    lambda rng: ("/completions", _long(rng) | {"logprobs": 1}),
    lambda rng: ("/chat/completions", _long(rng) | {"n": 2, "logprobs": True}),
    lambda rng: ("/chat/completions", {"response_format": FORMAT, "max_tokens": 900, "temperature": 0}),
    lambda rng: ("/completions", _long(rng)),
    lambda rng: ("/completions", _long(rng) | {"presence_penalty": 0.5, "stop": ["kiso", "mune"]}),
    lambda rng: ("/chat/completions", {"tools": TOOLS, "tool_choice": "required", "max_tokens": 900, "temperature": 0}),
)
