"""The part of `make verify-all` that has to pass everywhere: two KV modes in every order, and three of the faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio
from pdq.client import new_request_id
from pdq.engines.plain import PlainAnswer
from pdq.messages import Order
from pdq.settings import ModelSpec
from pdq.verify.prompts import Prompt

from tests.matrix.faults import FAULTS
from tests.matrix.orders import ORDERS, in_order
from tests.matrix.rig import NOT_LOADED, REFUSED, Rig, Timed, running
from tests.matrix.run import answers, question
from tests.matrix.trial import attempt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]

PROMPTS, MAX_TOKENS = 5, 12
TRIED = {
    "host": [("decode's server hung", "waiting", NOT_LOADED)],
    "file": [("store full", "before", "handoffs store_failed"), ("chunks swapped", "waiting", REFUSED)],
}
"""Faults, and what counts each."""


class Asked(NamedTuple):
    prompts: list[Prompt]
    expected: list[PlainAnswer]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked(spec: ModelSpec) -> Asked:
    return Asked(*await answers(spec, PROMPTS, MAX_TOKENS))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(TRIED))
async def rig(
    asked: Asked, spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Rig]:
    """After `asked`: a small machine cannot hold all engines at one time."""
    async with running(request.param, tmp_path_factory.mktemp(request.param), spec) as rig:
        yield rig


@pytest.mark.parametrize("order", ORDERS)
async def test_answers_are_a_plain_engines_and_kv_is_loaded_as_promised(rig: Rig, asked: Asked, order: Order) -> None:
    cell = await in_order(rig, order, *asked)
    assert not cell.wrong
    assert cell.equal == PROMPTS
    assert (cell.loaded > 0) == (order != "decode-only")


async def test_what_the_tiers_hold_is_not_delegated_again(rig: Rig, asked: Asked) -> None:
    """By decode-first; and the answer stays the same."""
    (prompt, *_), (expected, *_) = asked
    stories, kv = [], []
    for order in ("prefill-first", "decode-first"):
        answer = Timed(new_request_id())
        given = await rig.ask(prompt, "again", order, MAX_TOKENS, answer)
        assert given.ids == expected.ids
        stories.append(answer.story)
        kv.append(given.loaded_tokens + given.local_tokens)
    assert stories[0] == ["accepted", "routed", "claim", "prefilled", "claim", "finished"]
    assert stories[1] == ["accepted", "routed", "claim", "finished"]
    assert kv[0] == kv[1] > 0


async def test_faults_cost_time_within_bounds_and_no_answer(rig: Rig, asked: Asked) -> None:
    for name, when, counter in TRIED[rig.mode]:
        (fault,) = [each for each in FAULTS if (each.name, each.when) == (name, when)]
        result = await attempt(rig, fault, question(*asked))
        assert not result.wrong
        assert result.loaded == 0
        assert counter in result.counted
