"""KV between two engines that have an LMCache server each: through a pool, or from peer to peer.

A pool in a directory is tested everywhere; the others (marker `matrix`) need servers that infra/locks/verify.lock
brings, or more time.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from pdq.engines.base import Phase, Work
from pdq.kv.tier import Tier
from pdq.kv.where import Where
from pdq.settings import KvServerSettings, KvSettings, ModelSpec

from tests.broker import free_port
from tests.e2e.conftest import KvServer, Pair, answer, greedy
from tests.e2e.stores import MODES, Shared, shared

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
]

MOVED = {31: (0, 0), 32: (32, 31), 64: (64, 63), 200: (192, 192), 1000: (992, 992)}
"""Prompt tokens → tokens that prefill stores, tokens that decode loads. The last token is always computed."""
SIZES = KvServerSettings(memory_gb=0.5)
BOUND_S = 60.0
TENANT_GB = 0.06
"""Room for one prompt of a thousand tokens, below the watermark, and not for two."""


class Modes(Pair):
    """A pair whose servers share what a mode gives them."""

    def __init__(self, spec: ModelSpec, store: Shared, root: Path, tenant_gb: float) -> None:
        self.store = store
        self.sizes = msgspec.structs.replace(SIZES, tenant_gb=tenant_gb)
        self.far = "peer" if store.settings["mode"] == "p2p" else "l2"
        """The tier that decode loads from."""
        self.confirmed = "l1" if self.far == "peer" else "l2"
        """The tier that prefill's KV is confirmed in."""
        super().__init__(spec, *(self._server(root / name, spec) for name in ("prefill", "decode")))

    def _server(self, directory: Path, spec: ModelSpec) -> KvServer:
        peer = {"peer": f"127.0.0.1:{free_port()}"} if self.far == "peer" else {}
        server = KvServer(directory, spec, self.sizes, **self.store.settings, **peer)
        server.kv = msgspec.structs.replace(server.kv, save_decode=True)
        return server


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(mode, marks=() if mode == "file" else pytest.mark.matrix) for mode in MODES],
)
async def pair(
    spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Modes]:
    root = tmp_path_factory.mktemp(request.param)
    with shared(request.param, root) as store:
        pair = Modes(spec, store, root, TENANT_GB if request.param == "redis" else 0.0)
        try:
            await pair.start()
            yield pair
        finally:
            await pair.stop()


@pytest.mark.parametrize("num", MOVED)
async def test_decode_loads_what_prefill_stored(pair: Modes, salt: str, num: int) -> None:
    mine = work(num, salt)
    before = await where(pair, mine)
    stored, answered = await pair.handoff(mine)
    tell(pair, num, *stored.phases, *answered.done.phases)
    assert (before.near, before.far or 0) == (0, 0)
    assert (stored.stored_tokens, answered.done.loaded_tokens) == MOVED[num]
    assert answered.done.local_tokens == 0
    assert answered.ids == await computed(pair, mine)
    assert tiers(stored.phases) == ({"kv.store": pair.confirmed} if num > 31 else {})
    assert tiers(answered.done.phases) == ({"kv.load": pair.far} if num > 31 else {})


async def test_kv_goes_no_other_way(pair: Modes, salt: str) -> None:
    """Positive control: what the servers share is emptied between the two stages, and decode finds nothing."""
    mine = work(200, salt)
    assert (await pair.prefill.prefill(mine)).stored_tokens == 192
    pair.store.forget(pair.kv)
    answered = await answer(pair.decode, mine)
    assert (answered.done.loaded_tokens, answered.ids) == (0, await computed(pair, mine))


async def test_what_came_from_afar_is_near_the_next_time(pair: Modes, salt: str) -> None:
    mine = work(200, salt)
    _, first = await pair.handoff(mine)
    pair.store.forget(pair.kv)
    assert first.done.loaded_tokens == 192
    assert (await where(pair, mine)).near == 6


async def test_what_is_staged_is_near_before_decode_asks(pair: Modes, salt: str) -> None:
    """Control: two prompts are prefilled, and one is staged."""
    mine, other = work(200, salt), work(200, salt)
    for each in (mine, other):
        assert (await pair.prefill.prefill(each)).stored_tokens == 192
    assert await pair.decode.stage(mine.prompt, salt) == 192
    assert [(await where(pair, each)).near for each in (mine, other)] == [6, 0]
    staged, fetched = await answer(pair.decode, mine), await answer(pair.decode, other)
    tell(pair, 200, *staged.done.phases, *fetched.done.phases)
    assert (staged.done.loaded_tokens, fetched.done.loaded_tokens) == (192, 192)
    assert (tiers(staged.done.phases), tiers(fetched.done.phases)) == ({"kv.load": "l1"}, {"kv.load": pair.far})
    assert staged.ids == await computed(pair, mine)
    assert await pair.decode.stage(work(200, salt).prompt, salt) == 0, "what nobody has stored"
    assert await pair.decode.stage(mine.prompt[:31], salt) == 0


async def test_the_next_turn_of_a_chat_finds_prompt_and_answer(pair: Modes, salt: str) -> None:
    """The first turn is handed off; the second finds it in the engine, the third finds both in the tier."""
    first = talk(work(100, salt).prompt, salt)
    _, said = await pair.handoff(first)
    second = talk((*first.prompt, *said.ids, *work(30, salt).prompt), salt)
    again = await answer(pair.decode, second)
    third = talk((*second.prompt, *again.ids, *work(30, salt).prompt), salt)
    async with asyncio.timeout(BOUND_S):
        while (await where(pair, third)).near < 6:
            await asyncio.sleep(0.05)
    await forget_own(pair)
    last = await answer(pair.decode, third)
    found = [(each.done.local_tokens, each.done.loaded_tokens) for each in (said, again, last)]
    print(f"{pair.store.name:6} chat of 100, 170 and 240 tokens, (local, loaded): {found}")
    assert found == [(0, 96), (128, 0), (0, 192)]
    assert [again.ids, last.ids] == [await computed(pair, each) for each in (second, third)]
    # An answer whose worker died after 30 tokens goes on elsewhere.
    await forget_own(pair)
    rest = await answer(pair.decode, msgspec.structs.replace(first, shown=tuple(said.ids[:30])))
    assert (rest.done.loaded_tokens, rest.ids) == (128, said.ids[30:])


def talk(prompt: tuple[int, ...], salt: str) -> Work:
    return Work(request="r", prompt=prompt, sampling=greedy(40, ignore_eos=True), salt=salt)


async def forget_own(pair: Modes) -> None:
    """Empty decode's own prefix cache, as a restart does."""
    assert await pair.decode._llm.reset_prefix_cache()


async def test_the_server_tells_what_it_holds(pair: Modes, salt: str) -> None:
    mine = work(200, salt)
    await pair.handoff(mine)
    told = await pdq_kv(pair.decode_server.kv)
    (near, *far), server = told["levels"], pair.decode_server.kv
    assert (told["http_port"], near["kind"]) == (server.http_port, "memory")
    assert near["used_bytes"] > 192 * pair.decode.info.kv_bytes_per_token
    assert [(level["tier"], level["healthy"]) for level in far] == [(pair.far, True)]
    assert told["asked_tokens"] >= told["far_tokens"] >= 192
    assert told["hit_rates"]["far"] == told["far_tokens"] / told["asked_tokens"]


async def test_the_other_server_hangs(pair: Modes, salt: str) -> None:
    """Decode waits for it no longer than it may, and needs nothing of it where there is a pool."""
    mine = work(200, salt)
    assert (await pair.prefill.prefill(mine)).stored_tokens == 192
    pair.server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            answered = await answer(pair.decode, mine)
        tell(pair, -1, *answered.done.phases)
    finally:
        pair.server.signal(signal.SIGCONT)
    assert answered.done.loaded_tokens == (0 if pair.far == "peer" else 192)
    assert answered.ids == await computed(pair, mine)
    await until_kv_flows(pair, salt)


async def test_a_tenant_keeps_no_more_than_its_quota_and_costs_others_nothing(pair: Modes, salt: str) -> None:
    if not pair.sizes.tenant_gb:
        pytest.skip("this pool has no quotas")
    other = work(200, secrets.token_hex(32))
    assert (await pair.prefill.prefill(other)).stored_tokens == 192
    for _ in range(2):
        assert (await pair.prefill.prefill(work(1_000, salt))).stored_tokens == 992
    async with asyncio.timeout(BOUND_S):
        while (await held(pair, salt))["used_bytes"] > pair.sizes.tenant_gb * (1 << 30):
            await asyncio.sleep(0.2)
    assert (await held(pair, salt))["quota_bytes"] == int(pair.sizes.tenant_gb * (1 << 30))
    assert (await where(pair, other)).far == 6


async def held(pair: Modes, salt: str) -> dict[str, Any]:
    """What prefill's server says of a tenant."""
    (tenant,) = [each for each in (await pdq_kv(pair.kv))["tenants"] if each["salt"] == salt]
    found: dict[str, Any] = tenant
    return found


async def test_what_servers_share_dies_and_comes_back(pair: Modes, salt: str) -> None:
    """Nothing waits for it, nothing is wrong meanwhile, and it is used again."""
    process = pair.store.process
    if process is None:
        pytest.skip("a directory does not die")
    process.kill()
    try:
        async with asyncio.timeout(BOUND_S):
            mine = work(200, salt)
            stored, answered = await pair.handoff(mine)
            tell(pair, 0, *stored.phases, *answered.done.phases)
            ids = await computed(pair, mine)
    finally:
        process.start()
    # Peers know each other by now: they need no coordinator to go on.
    moved = 192 if pair.far == "peer" else 0
    assert (stored.stored_tokens, answered.done.loaded_tokens) == (moved, moved)
    assert answered.ids == ids
    await until_kv_flows(pair, salt)


async def until_kv_flows(pair: Modes, salt: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await pair.handoff(work(64, salt)))[1].done.loaded_tokens != 63:
            await asyncio.sleep(0.5)


async def pdq_kv(kv: KvSettings) -> dict[str, Any]:
    """What `pdq kv` says of a server."""
    line = [sys.executable, "-m", "pdq", "kv", "--http-port", str(kv.http_port), "--json"]
    process = await asyncio.create_subprocess_exec(*line, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    (server,) = json.loads(output)["servers"]
    found: dict[str, Any] = server
    return found


def work(num: int, salt: str) -> Work:
    tokens = tuple(secrets.randbelow(40_000) + 100 for _ in range(num))
    return Work(request="r", prompt=tokens, sampling=greedy(4, ignore_eos=True), salt=salt)


async def where(pair: Modes, each: Work) -> Where:
    """What decode's own server knows of a prompt's chunks."""
    tier = Tier(pair.decode_server.kv, pair.spec.id)
    try:
        return await tier.where(each.prompt, each.salt)
    finally:
        await tier.close()


def tiers(phases: Sequence[Phase]) -> dict[str, object]:
    return {phase.name: phase.attributes["pdq.kv.tier"] for phase in phases if "pdq.kv.tier" in phase.attributes}


async def computed(pair: Modes, each: Work) -> list[int]:
    """The tokens that decode answers when it finds no KV."""
    answered = await answer(pair.decode, msgspec.structs.replace(each, salt=secrets.token_hex(32)))
    assert answered.done.loaded_tokens == 0
    return answered.ids


def tell(pair: Modes, num: int, *phases: Phase) -> None:
    """The figures of docs/kv.md: `pytest -s` shows them."""
    ends = {phase.name: phase.end_ns for phase in phases}
    for phase in phases:
        print(f"{pair.store.name:6} {num:5} {phase.name:15} {phase.duration_ms:8.1f} ms  {phase.attributes}")
    if {"kv.store", "engine.prefill"} <= ends.keys():
        confirmed_ms = (ends["kv.store"] - ends["engine.prefill"]) / 1e6
        print(f"{pair.store.name:6} {num:5} {'confirmed':15} {confirmed_ms:8.1f} ms after the prefill")
