"""What two answers to one prompt have in common, and whether that is enough. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pdq.engines.plain import PlainAnswer

TOLERANCE = 1e-3
"""Log probabilities may differ by less: an order of magnitude above float32's noise, and far below bad KV's."""

Outcome = Literal["equal", "differs", "recomputed", "failed"]


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """A stack's answer, and what became of its KV."""

    name: str
    request: str
    order: str = ""
    prompt_tokens: int = 0
    ids: list[int] = []
    logprobs: list[float] = []
    promised_tokens: int = 0
    loaded_tokens: int = 0
    local_tokens: int = 0
    """Of the prompt's KV, what decode's own engine still had."""
    error: str = ""
    """The code that the request ended with, unless it finished."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's result. `cause` says in a few words why it is not `equal`."""

    name: str
    request: str
    outcome: Outcome
    cause: str = ""
    order: str
    prompt_tokens: int
    promised_tokens: int
    loaded_tokens: int
    local_tokens: int
    tokens: int
    """Of the stack's answer."""
    equal_tokens: int
    """Those at its start that are the plain engine's."""
    first_delta: float | None
    """|Δ| of the first token's log probability; None where the tokens differ."""
    max_delta: float | None
    """The largest |Δ| over all tokens in which both agree."""
    gap: float | None
    """Where they part: the plain engine's gap between its two likeliest tokens. Near 0, either may win by noise."""

    @property
    def ok(self) -> bool:
        return self.outcome == "equal"


def compare(given: Given, plain: PlainAnswer, chunk_tokens: int, *, allow_recompute: bool = False) -> Verdict:
    """The verdict on one prompt. chunk_tokens: KV moves in whole chunks of so many tokens.

    allow_recompute: the right answer is enough, even where decode computed KV that it should have loaded.
    """
    equal = _equal(given.ids, plain.ids)
    deltas = [abs(one - other) for one, other in zip(given.logprobs[:equal], plain.logprobs[:equal], strict=True)]
    outcome, cause = _judge(given, plain, deltas, chunk_tokens, allow_recompute)
    return Verdict(
        name=given.name,
        request=given.request,
        outcome=outcome,
        cause=cause,
        order=given.order,
        prompt_tokens=given.prompt_tokens,
        promised_tokens=given.promised_tokens,
        loaded_tokens=given.loaded_tokens,
        local_tokens=given.local_tokens,
        tokens=len(given.ids),
        equal_tokens=equal,
        first_delta=deltas[0] if deltas else None,
        max_delta=max(deltas, default=None),
        gap=plain.gaps[equal] if equal < len(given.ids) and equal < len(plain.ids) else None,
    )


def _judge(
    given: Given, plain: PlainAnswer, deltas: Sequence[float], chunk_tokens: int, allow_recompute: bool
) -> tuple[Outcome, str]:
    if given.error:
        return "failed", given.error
    if given.prompt_tokens != plain.prompt_tokens:
        return "differs", f"the prompt has {given.prompt_tokens} tokens here, {plain.prompt_tokens} there"
    if given.ids != plain.ids:
        return "differs", f"from token {len(deltas)} on"
    if not deltas:
        return "failed", "there is no token"
    if deltas[0] >= TOLERANCE:
        return "differs", f"the first token's log probability, by {deltas[0]:.1e}"
    lacking = kv_tokens(given, chunk_tokens) - given.loaded_tokens - given.local_tokens
    if lacking > 0 and not allow_recompute:
        return "recomputed", f"{lacking} tokens of KV"
    return "equal", ""


def kv_tokens(given: Given, chunk_tokens: int) -> int:
    """Tokens whose KV decode has no need to compute. (The prompt's last token it always computes.)"""
    if given.order == "decode-only":
        return 0
    return max(0, min(given.prompt_tokens // chunk_tokens * chunk_tokens, given.prompt_tokens - 1))


def _equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
