"""KV between two engines that have an LMCache server each: through a pool, or from peer to peer."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from pdq.engines.base import Phase, Work
from pdq.kv import keys
from pdq.kv.tier import Tier
from pdq.settings import ModelSpec

from tests.e2e.conftest import KvServer, Pair, answer, greedy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]

MOVED = {31: (0, 0), 32: (32, 31), 64: (64, 63), 200: (192, 192), 1000: (992, 992)}
"""Prompt tokens → tokens that prefill stores, tokens that decode loads. The last token is always computed."""
SERVER_GB = 0.5


def work(num: int, salt: str) -> Work:
    tokens = tuple(secrets.randbelow(40_000) + 100 for _ in range(num))
    return Work(request="r", prompt=tokens, sampling=greedy(4, ignore_eos=True), salt=salt)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    root = tmp_path_factory.mktemp("modes")
    kv = {"mode": "pool", "pool": f"file://{root}/pool", "key_file": str(keys.ensure(root / "key"))}
    servers = [KvServer(root / name, spec, SERVER_GB, **kv) for name in ("prefill", "decode")]
    pair = Pair(spec, *servers)
    try:
        await pair.start()
        yield pair
    finally:
        await pair.stop()


@pytest.mark.parametrize("num", MOVED)
async def test_decode_loads_what_prefill_stored(pair: Pair, salt: str, num: int) -> None:
    mine = work(num, salt)
    before = await where(pair, mine)
    stored, answered = await pair.handoff(mine)
    print(
        "STORED",
        num,
        [(p.name, round(p.duration_ms, 1), p.attributes) for p in (*stored.phases, *answered.done.phases)],
    )
    assert before.near == 0
    assert (stored.stored_tokens, answered.done.loaded_tokens) == MOVED[num]
    assert answered.done.local_tokens == 0
    assert answered.ids == await computed(pair, mine)
    assert tiers([*stored.phases, *answered.done.phases]) == ({"kv.store": "l2", "kv.load": "l2"} if num > 31 else {})


async def where(pair: Pair, each: Work):
    tier = Tier(pair.decode_server.kv, pair.spec.id)
    try:
        return await tier.where(each.prompt, each.salt)
    finally:
        await tier.close()


def tiers(phases: list[Phase]) -> dict[str, object]:
    return {phase.name: phase.attributes["pdq.kv.tier"] for phase in phases if "pdq.kv.tier" in phase.attributes}


async def computed(pair: Pair, each: Work) -> list[int]:
    """The tokens that decode answers when it finds no KV."""
    answered = await answer(pair.decode, msgspec.structs.replace(each, salt=secrets.token_hex(32)))
    assert answered.done.loaded_tokens == 0
    return answered.ids
