"""The order of a request, as a decision table."""

import pytest
from pdq.errors import Rejected
from pdq.messages import Order
from pdq_router.order import OrderInputs, decide

PREFILL, DECODE_ONLY, DECODE_FIRST = "prefill-first", "decode-only", "decode-first"

TABLE = [
    # requested, default, prompt tokens, live prefill workers → order, reason (a chunk has 32 tokens)
    (None, PREFILL, 32, 1, PREFILL, "default"),
    (None, PREFILL, 1000, 3, PREFILL, "default"),
    (None, PREFILL, 31, 1, DECODE_ONLY, "short_prompt"),
    (None, PREFILL, 1, 1, DECODE_ONLY, "short_prompt"),
    (None, PREFILL, 1000, 0, DECODE_ONLY, "no_prefill_worker"),
    (None, PREFILL, 1, 0, DECODE_ONLY, "no_prefill_worker"),
    (None, DECODE_ONLY, 1000, 1, DECODE_ONLY, "default"),
    (None, DECODE_ONLY, 1, 0, DECODE_ONLY, "default"),
    # what was asked for stands, whatever else is known
    (PREFILL, PREFILL, 1, 1, PREFILL, "requested"),
    (PREFILL, DECODE_ONLY, 1, 0, PREFILL, "requested"),
    (DECODE_ONLY, PREFILL, 1000, 1, DECODE_ONLY, "requested"),
    (DECODE_ONLY, DECODE_FIRST, 1000, 1, DECODE_ONLY, "requested"),
]


def inputs(requested: Order | None, default: Order, prompt_tokens: int, workers: int) -> OrderInputs:
    return OrderInputs(
        requested=requested,
        default=default,
        prompt_tokens=prompt_tokens,
        chunk_tokens=32,
        live_prefill_workers=workers,
    )


@pytest.mark.parametrize(("requested", "default", "tokens", "workers", "order", "reason"), TABLE)
def test_decision(requested: Order | None, default: Order, tokens: int, workers: int, order: str, reason: str) -> None:
    decision = decide(inputs(requested, default, tokens, workers))
    assert (decision.order, decision.reason) == (order, reason)
    assert decision.inputs == {"prompt_tokens": tokens, "chunk_tokens": 32, "live_prefill_workers": workers}


def test_decode_first_is_not_served_yet() -> None:
    with pytest.raises(Rejected) as caught:
        decide(inputs("decode-first", "prefill-first", 100, 1))
    assert (caught.value.code, caught.value.param) == ("unsupported", "Pdq-Order")
    assert "'decode-first'" in str(caught.value) and "prefill-first and decode-only" in str(caught.value)
