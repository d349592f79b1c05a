"""Which way a request takes: one pure function of what is known when it is routed.

The reason is one of a small set, and goes into the request log with the inputs:
`requested`, `default`, `short_prompt`, `no_prefill_worker`.
"""

from __future__ import annotations

import msgspec
from pdq.messages import Order

from pdq_router.refusals import refuse


class OrderInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What an order is decided from."""

    requested: Order | None = None
    """The request's own wish (`Pdq-Order`)."""
    default: Order = "prefill-first"
    prompt_tokens: int
    chunk_tokens: int
    """KV moves in whole chunks of so many tokens."""
    live_prefill_workers: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    order: Order
    reason: str
    inputs: dict[str, float]
    """The numbers among the inputs, for the request log."""


def decide(inputs: OrderInputs) -> Decision:
    """The first rule that holds decides. Raises Rejected for decode-first, which is not served."""
    order, reason = _first_rule(inputs)
    if order == "decode-first":
        raise refuse(
            "unsupported", "Pdq-Order", "Pdq-Order is 'decode-first'; only prefill-first and decode-only are served"
        )
    return Decision(order=order, reason=reason, inputs=_numbers(inputs))


def _first_rule(inputs: OrderInputs) -> tuple[Order, str]:
    if inputs.requested is not None:
        return inputs.requested, "requested"
    if inputs.default == "decode-only":
        return "decode-only", "default"
    if not inputs.live_prefill_workers:
        return "decode-only", "no_prefill_worker"
    if inputs.prompt_tokens < inputs.chunk_tokens:
        # Without a whole chunk there is no KV to hand over.
        return "decode-only", "short_prompt"
    return inputs.default, "default"


def _numbers(inputs: OrderInputs) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(inputs).items() if isinstance(value, int)}
