"""KV really moves between two engines, is confirmed before it is promised, and failing tiers cost only time."""

from __future__ import annotations

import asyncio
import secrets
import signal

import aiohttp
import msgspec
import pytest
from pdq.engines.base import Work
from pdq.engines.vllm import VllmEngine
from pdq.errors import Interrupted
from pdq.kv.tier import Tier

from tests.e2e.conftest import SIZES, Pair, answer, greedy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("pair", ["engine_driven", "lmcache_driven"], indirect=True),
]

BOUND_S = 60.0
"""Far above what a bounded wait takes, far below the 300 s and more of the libraries' own defaults."""

MOVED = {31: (0, 0), 32: (32, 31), 33: (32, 32), 64: (64, 63), 200: (192, 192), 1000: (992, 992)}
"""Prompt tokens → tokens that prefill stores, tokens that decode loads. The last token is always computed."""


def tokens(num: int) -> tuple[int, ...]:
    return tuple(secrets.randbelow(40_000) + 100 for _ in range(num))


def work(num: int, salt: str, request: str = "r") -> Work:
    return Work(request=request, prompt=tokens(num), sampling=greedy(4, ignore_eos=True), salt=salt)


@pytest.mark.parametrize("num", MOVED)
async def test_decode_loads_what_prefill_stored(pair: Pair, salt: str, num: int) -> None:
    mine = work(num, salt)
    stored, answered = await pair.handoff(mine)
    assert (stored.stored_tokens, answered.done.loaded_tokens) == MOVED[num]
    assert answered.ids == await computed(pair, mine)
    assert answered.done.local_tokens == 0
    assert stored.stored_bytes == stored.stored_tokens * pair.prefill.info.kv_bytes_per_token
    assert stored.cause == ("" if stored.stored_tokens else "short_prompt")


async def test_a_server_has_all_of_its_memory_from_the_start(pair: Pair) -> None:
    found = pair.server.segment.stat()
    assert found.st_size == int(SIZES.memory_gb * (1 << 30))
    assert found.st_blocks * 512 >= found.st_size


async def test_without_prefill_nothing_is_loaded(pair: Pair, salt: str) -> None:
    assert (await answer(pair.decode, work(200, salt))).done.loaded_tokens == 0


async def test_another_salt_finds_nothing(pair: Pair, salt: str) -> None:
    mine = work(200, salt)
    assert (await pair.prefill.prefill(mine)).stored_tokens == 192
    await computed(pair, mine)


async def test_phases_say_what_happened_when(pair: Pair, salt: str) -> None:
    stored, answered = await pair.handoff(work(200, salt))
    prefill = {phase.name: phase for phase in stored.phases}
    decode = {phase.name: phase for phase in answered.done.phases}
    assert list(prefill) == ["kv.lookup", "engine.prefill", "kv.store"]
    assert list(decode) == ["kv.lookup", "kv.load", "engine.decode"]
    assert prefill["kv.store"].attributes["pdq.kv.tokens"] == 192
    assert decode["kv.load"].attributes["pdq.kv.tokens"] == 192
    assert [name for name, _ in decode["engine.decode"].events] == ["first_token", "second_token", "last_token"]
    assert prefill["kv.store"].end_ns <= decode["kv.load"].start_ns
    for phase in (*stored.phases, *answered.done.phases):
        assert phase.start_ns <= phase.end_ns
        assert all(phase.start_ns <= at <= phase.end_ns for _, at in phase.events)


async def test_a_prompt_that_is_there_already_counts_as_readable(pair: Pair, salt: str) -> None:
    again = work(200, salt)
    first, second = await pair.prefill.prefill(again), await pair.prefill.prefill(again)
    assert (first.stored_tokens, second.stored_tokens) == (192, 192)
    assert "kv.store" not in {phase.name for phase in second.phases}


async def test_a_longer_prompt_stores_only_what_is_missing(pair: Pair, salt: str) -> None:
    short = work(100, salt)
    longer = Work(request="r", prompt=short.prompt + tokens(100), sampling=short.sampling, salt=salt)
    assert (await pair.prefill.prefill(short)).stored_tokens == 96
    stored, answered = await pair.handoff(longer)
    assert (stored.stored_tokens, answered.done.loaded_tokens) == (192, 192)


async def test_what_the_tier_has_lost_is_stored_again(pair: Pair, salt: str) -> None:
    """The engine still has it in its own prefix cache, which decode cannot read."""
    again = work(200, salt)
    assert (await pair.prefill.prefill(again)).stored_tokens == 192
    await clear(pair)
    assert not await holds(pair, again)
    stored, answered = await pair.handoff(again)
    assert (stored.stored_tokens, answered.done.loaded_tokens) == (192, 192)


async def test_many_at_once_each_load_their_own(pair: Pair, salt: str) -> None:
    works = [work(64 + 8 * index, salt, f"r{index}") for index in range(16)]
    results = await asyncio.gather(*(pair.handoff(each) for each in works))
    assert [stored.stored_tokens for stored, _ in results] == [len(each.prompt) // 32 * 32 for each in works]
    for each, (stored, answered) in zip(works, results, strict=True):
        assert answered.done.loaded_tokens == min(stored.stored_tokens, len(each.prompt) - 1)


async def test_cancelling_prefill_stops_it_within_a_step(pair: Pair, salt: str) -> None:
    """A step takes at most max_num_batched_tokens (512): the rest of a long prompt is never computed."""
    long = work(1900, salt)
    task = asyncio.create_task(pair.prefill.prefill(long))
    await until_running(pair.prefill)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(pair.prefill)
    assert not await holds(pair, long)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_short_prompt_behind_a_long_one_does_not_wait_for_its_end(pair: Pair, salt: str, stage: str) -> None:
    """An engine serves in the order of arrival, but a long prompt leaves half of each step to those behind it."""
    ended: list[str] = []

    async def run(name: str, num: int) -> None:
        each = msgspec.structs.replace(work(num, salt, name), sampling=greedy(1, ignore_eos=True))
        await (pair.prefill.prefill(each) if stage == "prefill" else answer(pair.decode, each))
        ended.append(name)

    long = asyncio.create_task(run("long", 1900))
    await until_running(pair.prefill if stage == "prefill" else pair.decode)
    await run("short", 40)
    await long
    assert ended == ["short", "long"]


async def test_aborting_by_request_interrupts_prefill_and_decode(pair: Pair, salt: str) -> None:
    endless = Work(request="endless", prompt=tokens(40), sampling=greedy(1500, ignore_eos=True), salt=salt)
    long = work(1900, salt, "long")
    tasks = [asyncio.create_task(answer(pair.decode, endless)), asyncio.create_task(pair.prefill.prefill(long))]
    await until_running(pair.decode)
    await until_running(pair.prefill)
    await pair.decode.abort("endless")
    await pair.prefill.abort("long")
    await pair.prefill.abort("unknown")
    for task in tasks:
        with pytest.raises(Interrupted):
            await task
    await until_idle(pair.decode)
    await until_idle(pair.prefill)


async def test_leaving_a_decode_half_read_frees_it(pair: Pair, salt: str) -> None:
    endless = Work(request="endless", prompt=tokens(40), sampling=greedy(1500, ignore_eos=True), salt=salt)
    items = pair.decode.decode(endless)
    await anext(items)
    await items.aclose()
    await until_idle(pair.decode)


async def test_a_server_that_hangs_costs_time_and_no_answer(pair: Pair, salt: str) -> None:
    prepared = work(200, salt)
    assert (await pair.prefill.prefill(prepared)).stored_tokens == 192
    pair.server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            stored = await pair.prefill.prefill(work(200, salt))
            answered = await answer(pair.decode, prepared)
    finally:
        pair.server.signal(signal.SIGCONT)
    assert (stored.stored_tokens, stored.cause in {"store_failed", "store_late"}) == (0, True)
    assert (answered.done.loaded_tokens, len(answered.ids)) == (0, 4)
    await until_kv_flows(pair, salt)


async def test_a_load_that_fails_halfway_is_computed_instead(pair: Pair, salt: str) -> None:
    """The lookup found it, and the server hangs before the load: the scheduler has counted on it already."""
    prepared, plain = work(200, salt, "prepared"), work(1500, salt, "plain")
    expected = await computed(pair, prepared)
    assert (await pair.prefill.prefill(prepared)).stored_tokens == 192
    # Loads begin after a step's forward pass: a long prompt in the same step leaves time to stop the server.
    busy = asyncio.create_task(answer(pair.decode, plain))
    await until_running(pair.decode)
    task = asyncio.create_task(answer(pair.decode, prepared))
    await until_found(pair.decode, prepared)
    pair.server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            answered = await task
            await busy
    finally:
        pair.server.signal(signal.SIGCONT)
    assert (answered.done.loaded_tokens, answered.ids) == (0, expected)
    await pair.decode.check()
    await until_kv_flows(pair, salt)


async def test_a_server_that_hangs_during_the_store_does_not_take_the_engine_with_it(pair: Pair, salt: str) -> None:
    """The lookup is answered; the server stops before the long prompt's last stores."""
    task = asyncio.create_task(pair.prefill.prefill(work(1900, salt)))
    await until_running(pair.prefill)
    pair.server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(BOUND_S):
            stored = await task
    finally:
        pair.server.signal(signal.SIGCONT)
    assert (stored.stored_tokens, stored.cause in {"store_failed", "store_late"}) == (0, True)
    await pair.prefill.check()
    await until_kv_flows(pair, salt)


async def test_a_killed_server_costs_time_and_no_answer_and_a_new_one_is_used(pair: Pair, salt: str) -> None:
    """The new one has room for less than the longest prompt: what does not fit is not promised."""
    prepared = work(200, salt)
    assert (await pair.prefill.prefill(prepared)).stored_tokens == 192
    pair.server.kill()
    async with asyncio.timeout(BOUND_S):
        stored = await pair.prefill.prefill(work(200, salt))
        answered = await answer(pair.decode, prepared)
    assert (stored.stored_tokens, stored.cause in {"store_failed", "store_late"}) == (0, True)
    assert (answered.done.loaded_tokens, len(answered.ids)) == (0, 4)
    await pair.server.start(memory_gb=0.0625)
    await until_kv_flows(pair, salt)
    stored = await pair.prefill.prefill(work(1900, salt))
    # A server without room may also leave a store unanswered, in `lmcache_driven` mode.
    assert (stored.stored_tokens, stored.cause in {"store_failed", "store_late"}) == (0, True)


async def computed(pair: Pair, each: Work) -> list[int]:
    """The tokens that decode answers when it finds no KV."""
    answered = await answer(pair.decode, msgspec.structs.replace(each, salt=secrets.token_hex(32)))
    assert answered.done.loaded_tokens == 0
    return answered.ids


async def until_kv_flows(pair: Pair, salt: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            stored, answered = await pair.handoff(work(64, salt))
            if (stored.stored_tokens, answered.done.loaded_tokens) == (64, 63):
                return


async def until_running(engine: VllmEngine) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await engine.stats())["running"] == 0:
            await asyncio.sleep(0.01)


async def until_found(engine: VllmEngine, each: Work) -> None:
    """The connector has told that the tier holds something of this prompt."""
    async with asyncio.timeout(BOUND_S):
        while not any(run.looked and run.looked.tier_tokens for run in engine._runs.values() if run.work is each):
            await asyncio.sleep(0.001)


async def until_idle(engine: VllmEngine) -> None:
    """No request runs or waits, and no KV block is in use."""
    async with asyncio.timeout(BOUND_S):
        while any((await engine.stats()).values()):
            await asyncio.sleep(0.01)


async def holds(pair: Pair, each: Work) -> bool:
    tier = Tier(pair.kv, pair.spec.id)
    try:
        return not await tier.lacks(each.prompt, each.salt, 2.0)
    finally:
        await tier.close()


async def clear(pair: Pair) -> None:
    url = f"http://{pair.kv.host}:{pair.kv.http_port}/cache/clear"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert response.status == 200
