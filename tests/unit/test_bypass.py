"""Which requests go on to decode when no prefill worker comes."""

from __future__ import annotations

import msgspec
import pytest
from pdq.log import first, follow
from pdq.messages import Promise, StageClaims, State
from pdq_router.bypass import waits

ROUTED = follow(first("accepted", submit_seq=1), "routed", order="prefill-first")
CLAIMED = follow(ROUTED, "claim", stage="prefill", prefill=StageClaims(attempt=1, owner="w"))
RELEASED = follow(CLAIMED, "released", prefill=StageClaims(attempt=1))
PREFILLED = follow(RELEASED, "prefilled", promise=Promise(tokens=64))


@pytest.mark.parametrize(
    ("state", "waiting"),
    [
        (ROUTED, True),
        (CLAIMED, False),
        (RELEASED, True),
        (PREFILLED, False),
        (follow(ROUTED, "claim", stage="decode", decode=StageClaims(attempt=1, owner="w")), False),
        (follow(ROUTED, "cancelling"), False),
        (follow(ROUTED, "cancelled"), False),
        (follow(ROUTED, "expired"), False),
    ],
    ids=lambda value: value.event if isinstance(value, State) else None,
)
def test_who_waits(state: State, waiting: bool) -> None:
    assert waits(state, state.at - 1.0) is waiting


def test_an_old_claim_holds_nobody_up() -> None:
    assert waits(msgspec.structs.replace(CLAIMED, at=100.0), 101.0)
    assert not waits(msgspec.structs.replace(CLAIMED, at=100.0), 99.0)
