"""The sim engine's parts, and what only the sim can show: its clock, its faults, its KV on disk."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pdq.bytes_tokenizer import BytesTokenizer
from pdq.engines import sim_timing
from pdq.engines.base import Done, Tokens, Work
from pdq.engines.sim import EXIT_STATUS, SimEngine, contract
from pdq.engines.sim_faults import Faults
from pdq.engines.sim_kv import KvDirectory
from pdq.engines.sim_model import START, Generation, advance, answer
from pdq.engines.sim_steps import Running, StepLoop
from pdq.errors import Interrupted, Misconfigured, Rejected, Unavailable
from pdq.messages import Sampling
from pdq.settings import EngineSettings, ModelSpec

from tests.contract.suite import Got, collect, greedy, prompt_of, work_of

SPEC = ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=2048, vocab_size=2048)
TOKENIZER = BytesTokenizer(SPEC.vocab_size)
BOUND_S = 20.0
POLL_S = 0.005

Start = Callable[..., Awaitable[SimEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts engines with the given settings, on one KV directory; closes them at the end."""
    engines: list[SimEngine] = []

    async def started(faults: str = "", **settings: Any) -> SimEngine:
        chosen = {"kind": "sim", "sim_kv_dir": str(tmp_path), "sim_faults": faults, **settings}
        engines.append(SimEngine(SPEC, EngineSettings(**chosen)))
        await engines[-1].start()
        return engines[-1]

    yield started
    for engine in engines:
        await engine.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something to become true: bounded, or fail."""
    for _ in range(int(BOUND_S / POLL_S)):
        if await condition():
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"not so within {BOUND_S:g} s")


def chunks_in(directory: Path) -> set[Path]:
    return set(directory.iterdir())


def state_after(prompt: tuple[int, ...]) -> bytes:
    state = START
    for token in prompt:
        state = advance(state, token)
    return state


# the clock


def test_a_prompt_costs_its_formula_however_it_is_chunked() -> None:
    profile = sim_timing.parse("opt-13b-a100-tp1")
    whole = 0.102 * 3000 + 7.1e-6 * 3000**2
    assert profile.prefill_ms(0, 3000) == pytest.approx(whole)
    assert sum(profile.prefill_ms(start, 500) for start in range(0, 3000, 500)) == pytest.approx(whole)
    assert profile.decode_ms(8, 4000) == pytest.approx(19.9 + 0.0385 * 8 + 6.3e-4 * 4000)


def test_profiles_take_a_factor() -> None:
    fast, plain = sim_timing.parse("llama2-70b-h100-tp8*0.1"), sim_timing.parse("llama2-70b-h100-tp8")
    assert fast.decode_ms(4, 100) == pytest.approx(plain.decode_ms(4, 100) / 10)
    assert sim_timing.parse("llama2-70b-h100-tp8 ×0.1") == fast
    assert sim_timing.parse("instant").decode_ms(100, 10**6) == 0


@pytest.mark.parametrize("text", ["h100", "", *(f"instant*{bad}" for bad in ("", "x", "0", "-1", "inf", "nan"))])
def test_a_profile_that_cannot_be_read_stops_the_start(text: str) -> None:
    with pytest.raises(Misconfigured, match="PDQ_ENGINE_SIM_PROFILE"):
        SimEngine(SPEC, EngineSettings(kind="sim", sim_profile=text))


class Recorded(sim_timing.Profile):
    """Takes no time, and tells what it was asked for: (`decode`, batch, kv) and (`prefill`, start, count)."""

    calls: list[tuple[str, int, int]]

    def prefill_ms(self, start: int, count: int) -> float:
        self.calls.append(("prefill", start, count))
        return 0.0

    def decode_ms(self, batch: int, kv_tokens: int) -> float:
        self.calls.append(("decode", batch, kv_tokens))
        return 0.0


async def steps_of(budget: int, *jobs: tuple[tuple[int, ...], int]) -> list[tuple[str, int, int]]:
    """Calls to the profile while jobs (a prompt, tokens to generate) run together from the start."""
    profile = Recorded((0, 0, 0), (0, 0, 0))
    profile.calls = []
    loop = StepLoop(profile, budget)
    stepping = asyncio.create_task(loop.run())
    running = [
        Running(prompt, 0, START, Generation(TOKENIZER, prompt, greedy(count), 10_000) if count else None)
        for prompt, count in jobs
    ]
    async with asyncio.timeout(BOUND_S):
        await asyncio.gather(*(loop.complete(one) for one in running))
    stepping.cancel()
    await asyncio.wait({stepping})
    return profile.calls


async def test_a_long_prompt_shares_its_steps_with_running_answers() -> None:
    calls = await steps_of(100, (prompt_of(10, "a"), 6), (prompt_of(280, "b"), 3))
    assert calls == [
        ("prefill", 0, 10),
        ("prefill", 0, 50),
        *[call for n in range(4) for call in (("prefill", 50 + 50 * n, 50), ("decode", 1, 11 + n))],
        # Alone it has the whole step.
        ("prefill", 250, 30),
        ("decode", 1, 15),
        ("decode", 1, 281),
        ("decode", 1, 282),
    ]


@pytest.mark.parametrize("tokens", [0, 1], ids=["prefill", "decode"])
async def test_a_short_prompt_behind_a_long_one_waits_for_no_more_than_the_step_under_way(tokens: int) -> None:
    calls = await steps_of(100, (prompt_of(400, "long"), tokens), (prompt_of(40, "short"), tokens))
    assert calls[:3] == [("prefill", 0, 50), ("prefill", 0, 40), ("prefill", 50, 100)]


async def test_a_prefill_alone_makes_no_token() -> None:
    assert await steps_of(64, (prompt_of(100, "p"), 0)) == [("prefill", 0, 64), ("prefill", 64, 36)]


async def test_answers_that_run_together_share_decode_steps() -> None:
    calls = await steps_of(512, *((prompt_of(8, f"batch {n}"), 4) for n in range(5)))
    assert [call for call in calls if call[0] == "decode"] == [("decode", 5, 45), ("decode", 5, 50), ("decode", 5, 55)]


async def test_who_leaves_in_a_step_gets_nothing_more_from_it() -> None:
    loop = StepLoop(sim_timing.parse("instant"), 512)
    made: list[Tokens] = []

    def once(running: Running, tokens: Tokens) -> None:
        made.append(tokens)
        loop.clear()

    works = [
        Running((1,), 0, START, Generation(TOKENIZER, (1,), greedy(5), 99), once),
        Running((2,), 0, START, Generation(TOKENIZER, (2,), greedy(5), 99), once),
    ]
    tasks = [asyncio.create_task(loop.run()), *(asyncio.create_task(loop.complete(work)) for work in works)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(made) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_loaded_tokens_take_no_time(start: Start) -> None:
    engine = await start()
    prompt = prompt_of(320, "skipped")
    await engine.prefill(work_of(prompt))
    assert (await engine.stats())["tokens_computed"] == 320
    await collect(engine, work_of(prompt))
    stats = await engine.stats()
    assert (stats["tokens_computed"], stats["tokens_loaded"]) == (321, 319)


# KV on disk


def test_a_flipped_byte_anywhere_is_a_miss(tmp_path: Path) -> None:
    kv, prompt = KvDirectory(str(tmp_path), 32), prompt_of(32, "bytes")
    states = b"".join(state_after(prompt[: end + 1]) for end in range(32))
    assert kv.store("aa", prompt, states, 0) == 1
    assert kv.load(kv.lookup("aa", prompt), prompt) == (1, 31, state_after(prompt[:31]))
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes((good[place] ^ 1,)) + good[place + 1 :])
        assert kv.load(kv.lookup("aa", prompt), prompt).chunks == 0
    for damaged in (good[:-1], good + b"\0", b""):
        path.write_bytes(damaged)
        assert kv.load(kv.lookup("aa", prompt), prompt).chunks == 0


async def test_a_file_under_anothers_name_is_a_miss(start: Start, tmp_path: Path) -> None:
    engine = await start()
    await engine.prefill(work_of(prompt_of(32, "one")))
    (one,) = chunks_in(tmp_path)
    await engine.prefill(work_of(prompt_of(32, "two")))
    (two,) = chunks_in(tmp_path) - {one}
    two.write_bytes(one.read_bytes())
    assert (await collect(engine, work_of(prompt_of(32, "two")))).done.loaded_tokens == 0
    assert (await collect(engine, work_of(prompt_of(32, "one")))).done.loaded_tokens == 31


async def test_a_damaged_chunk_hides_those_behind_it_and_is_stored_anew(start: Start, tmp_path: Path) -> None:
    engine, prompt = await start(), prompt_of(96, "middle")
    await engine.prefill(work_of(prompt[:64]))
    before = chunks_in(tmp_path)
    await engine.prefill(work_of(prompt[:32]))
    await engine.prefill(work_of(prompt))
    (last,) = chunks_in(tmp_path) - before
    last.write_bytes(b"damaged")
    assert (await collect(engine, work_of(prompt))).done.loaded_tokens == 64
    assert (await engine.prefill(work_of(prompt))).stored_tokens == 96
    assert (await collect(engine, work_of(prompt))).done.loaded_tokens == 95


async def test_the_kv_of_another_prompt_gives_another_answer(start: Start, tmp_path: Path) -> None:
    """KV is not decoration here: what decode loads is what it goes on from."""
    engine, prompt, other = await start(), prompt_of(40, "right"), prompt_of(40, "wrong")
    right = await collect(engine, work_of(prompt))
    states = b"".join(state_after(other[: end + 1]) for end in range(32))
    KvDirectory(str(tmp_path), 32).store(work_of(prompt).salt, prompt, states, 0)
    wrong = await collect(engine, work_of(prompt))
    assert wrong.done.loaded_tokens == 32
    assert wrong.ids != right.ids


async def test_prefill_reuses_a_common_beginning(start: Start) -> None:
    engine, prompt = await start(), prompt_of(100, "shared")
    await engine.prefill(work_of(prompt[:70]))
    assert (await engine.prefill(work_of(prompt))).stored_tokens == 96
    assert (await engine.stats())["tokens_loaded"] == 64


async def test_what_is_there_is_not_stored_again(start: Start) -> None:
    work = work_of(prompt_of(96, "there"))
    await (await start()).prefill(work)
    stored = await (await start("store.fail=1")).prefill(work)
    assert (stored.stored_tokens, stored.cause) == (96, "")
    assert [phase.name for phase in stored.phases] == ["kv.lookup", "kv.load", "engine.prefill"]


async def test_nothing_but_whole_chunks_is_left_in_the_directory(start: Start, tmp_path: Path) -> None:
    engine = await start()
    assert chunks_in(tmp_path) == set()  # the start has cleaned up its own probe
    await engine.prefill(work_of(prompt_of(100, "files")))
    assert [path.suffix for path in chunks_in(tmp_path)] == [".kv"] * 3


async def test_kv_crosses_processes(start: Start, tmp_path: Path) -> None:
    work = work_of(prompt_of(100, "elsewhere"))
    script = f"""
import asyncio
from pdq.engines.base import Work
from pdq.engines.sim import SimEngine
from pdq.messages import Sampling
from pdq.settings import EngineSettings, ModelSpec
async def main():
    spec = ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=2048, vocab_size=2048)
    engine = SimEngine(spec, EngineSettings(kind="sim", sim_kv_dir={str(tmp_path)!r}))
    await engine.start()
    work = Work(request="there", prompt={work.prompt!r}, sampling=Sampling(max_tokens=1), salt={work.salt!r})
    print((await engine.prefill(work)).stored_tokens)
    await engine.close()
asyncio.run(main())
"""
    ran = await asyncio.to_thread(run_python, script)
    assert (ran.returncode, ran.stdout.strip()) == (0, "96"), ran.stderr
    got = await collect(await start(), work)
    assert got.done.loaded_tokens == 96
    assert got.ids == answer(TOKENIZER, work.prompt, work.sampling, SPEC.max_model_len).ids


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("missing", ["", "/nowhere/at/all"])
async def test_without_a_directory_there_is_no_kv(start: Start, missing: str) -> None:
    engine, work = await start(sim_kv_dir=missing), work_of(prompt_of(100, "homeless"))
    stored = await engine.prefill(work)
    assert (stored.stored_tokens, stored.stored_bytes, stored.cause) == (0, 0, "store_failed")
    got = await collect(engine, work_of(work.prompt))
    assert (got.done.loaded_tokens, len(got.ids)) == (0, 12)


async def test_a_directory_that_vanishes_is_no_error(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    engine, work = await start(sim_kv_dir=str(directory)), work_of(prompt_of(64, "vanishing"))
    assert (await engine.prefill(work)).stored_tokens == 64
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    assert (await engine.prefill(work)).cause == "store_failed"
    assert (await collect(engine, work)).done.loaded_tokens == 0


async def test_a_directory_that_takes_no_chunk_stops_the_start() -> None:
    engine = SimEngine(SPEC, EngineSettings(kind="sim", sim_kv_dir="/proc"))
    with pytest.raises(Unavailable, match="did not start"):
        await engine.start()
    with pytest.raises(Unavailable):
        await engine.check()


# faults


async def test_shares_fall_evenly_and_on_the_first() -> None:
    async def failed(text: str, times: int) -> list[int]:
        faults, numbers = Faults(text), []
        for number in range(1, times + 1):
            try:
                await faults.before("prefill")
            except Unavailable:
                numbers.append(number)
        return numbers

    assert await failed("prefill.fail=0.25", 10) == [1, 5, 9]
    assert await failed("prefill.fail=0.1", 30) == [1, 11, 21]
    assert await failed("prefill.fail=1", 3) == [1, 2, 3]
    assert await failed("prefill.fail=0", 3) == []
    assert await failed(" prefill.fail_first = 2 , decode.fail=1,", 5) == [1, 2]


UNREADABLE = (
    "prefill, prefill.fail, prefill.fail=, prefill.fail=2, prefill.fail=-1, prefill.fail=nan, prefill.crash_after=1, "
    "load.hang=1, decode.fail_after=1.5, decode.fail_after=inf, store.delay_s=-1, gpu.fail=1, decode.fail:1"
)


@pytest.mark.parametrize("text", UNREADABLE.split(", "))
def test_faults_that_cannot_be_read_stop_the_start(text: str) -> None:
    with pytest.raises(Misconfigured, match="PDQ_ENGINE_SIM_FAULTS"):
        SimEngine(SPEC, EngineSettings(kind="sim", sim_faults=text))


async def test_a_failed_prefill_succeeds_when_tried_again(start: Start) -> None:
    engine, work = await start("prefill.fail_first=1"), work_of(prompt_of(64, "again"))
    with pytest.raises(Unavailable):
        await engine.prefill(work)
    assert (await engine.prefill(work)).stored_tokens == 64
    stats = await engine.stats()
    assert (stats["prefills_started"], stats["prefills_done"], stats["running"]) == (2, 1, 0)


async def test_a_failed_decode_gives_no_token(start: Start) -> None:
    engine, work = await start("decode.fail_first=1"), work_of(prompt_of(64, "again"))
    with pytest.raises(Unavailable):
        await anext(engine.decode(work))
    assert len((await collect(engine, work)).ids) == 12


@pytest.mark.parametrize(
    ("faults", "cause"),
    [("store.fail=1", "store_failed"), ("store.hang=1", "store_late"), ("store.delay_s=30", "store_late")],
)
async def test_a_store_that_fails_or_is_late_means_no_kv(start: Start, faults: str, cause: str) -> None:
    engine = await start(faults, store_timeout_s=0.05)
    stored = await engine.prefill(work_of(prompt_of(64, "unstored")))
    assert (stored.stored_tokens, stored.stored_bytes, stored.cause) == (0, 0, cause)
    assert stored.phases[-1].attributes["pdq.kv.cause"] == cause
    assert (await collect(engine, work_of(prompt_of(64, "unstored")))).done.loaded_tokens == 0


async def test_a_slow_store_within_its_bound_is_a_store(start: Start) -> None:
    engine = await start("store.delay_s=0.05")
    stored = await engine.prefill(work_of(prompt_of(64, "slow")))
    assert (stored.stored_tokens, stored.cause) == (64, "")
    assert {phase.name: phase for phase in stored.phases}["kv.store"].duration_ms >= 50


async def test_moving_kv_takes_the_links_time_for_each_token(start: Start) -> None:
    engine, work = await start(sim_kv_us=500), work_of(prompt_of(64, "linked"))
    stored = {phase.name: phase for phase in (await engine.prefill(work)).phases}
    loaded = {phase.name: phase for phase in (await collect(engine, work)).done.phases}
    assert stored["kv.store"].duration_ms >= 32 and loaded["kv.load"].duration_ms >= 31.5


async def test_a_failed_load_is_a_miss(start: Start) -> None:
    engine, work = await start("load.fail_first=1"), work_of(prompt_of(64, "unloaded"))
    await engine.prefill(work)
    assert [(await collect(engine, work)).done.loaded_tokens for _ in range(2)] == [0, 63]


async def test_a_decode_that_fails_after_tokens_has_given_them(start: Start) -> None:
    engine = await start("decode.fail_after=5")
    items: list[Tokens | Done] = []
    with pytest.raises(Unavailable):
        async for item in engine.decode(work_of(prompt_of(9, "five"))):
            items.append(item)
    assert sum(len(item.ids) for item in items if isinstance(item, Tokens)) == 5
    assert all(isinstance(item, Tokens) for item in items)
    await engine.check()
    assert len((await collect(engine, work_of(prompt_of(9, "four"), greedy(4)))).ids) == 4


async def test_silent_work_ends_when_it_is_stopped(start: Start) -> None:
    engine = await start("decode.hang_after=3,prefill.hang=1")
    decode = asyncio.create_task(collect(engine, (work := work_of(prompt_of(9, "silent")))))
    prefill = asyncio.create_task(engine.prefill(work_of(prompt_of(9, "silent"))))
    await until(lambda: _has(engine, tokens=3, running=2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not decode.done() and not prefill.done()
    await engine.abort(work.request)
    prefill.cancel()
    with pytest.raises(Interrupted):
        await decode
    with pytest.raises(asyncio.CancelledError):
        await prefill
    stats = await engine.stats()
    assert (stats["running"], stats["waiting"], stats["tokens"], stats["kv_tokens"]) == (0, 0, 3, 0)


async def test_a_crash_ends_everything_for_good(start: Start) -> None:
    engine, work = await start("decode.crash_after=10"), work_of(prompt_of(9, "crash"), greedy(6))
    assert len((await collect(engine, work)).ids) == 6
    with pytest.raises(Unavailable, match="crash_after"):
        await collect(engine, work)
    assert await _has(engine, tokens=10, running=0)
    for refused in (engine.check(), engine.prefill(work), collect(engine, work)):
        with pytest.raises(Unavailable, match="crash_after"):
            await refused


@pytest.mark.parametrize("tokens", [8, 9])
async def test_a_crash_takes_what_runs_and_what_waits_with_it(start: Start, tokens: int) -> None:
    engine = await start(f"decode.crash_after={tokens}", max_num_seqs=2, sim_profile="opt-13b-a100-tp1*0.3")
    works = [work_of(prompt_of(9, f"crash {number}"), greedy(100)) for number in range(3)]
    ended = await asyncio.gather(*(collect(engine, work) for work in works), return_exceptions=True)
    assert [type(end) for end in ended] == [Unavailable] * 3
    assert await _has(engine, tokens=tokens, decodes_started=2, running=0, waiting=0)


async def test_exit_after_ends_the_process() -> None:
    script = """
import asyncio
from pdq.engines.base import Work
from pdq.engines.sim import SimEngine
from pdq.messages import Sampling
from pdq.settings import EngineSettings, ModelSpec
async def main():
    spec = ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=2048, vocab_size=2048)
    engine = SimEngine(spec, EngineSettings(kind="sim", sim_faults="decode.exit_after=4"))
    await engine.start()
    work = Work(request="r", prompt=(1,), sampling=Sampling(max_tokens=9, ignore_eos=True), salt="")
    try:
        async for _ in engine.decode(work):
            pass
    finally:
        print("cleaned up")
asyncio.run(main())
"""
    ran = await asyncio.to_thread(run_python, script)
    assert (ran.returncode, ran.stdout) == (EXIT_STATUS, ""), ran.stderr


# slots, stops, counts


async def _has(engine: SimEngine, **wanted: int) -> bool:
    stats = await engine.stats()
    return all(stats[name] == value for name, value in wanted.items())


async def test_no_more_run_than_there_are_slots(start: Start) -> None:
    engine = await start("decode.hang_after=1", max_num_seqs=3)
    works = [work_of(prompt_of(9, f"slots {number}"), greedy(2)) for number in range(8)]
    tasks = [asyncio.create_task(collect(engine, work)) for work in works]
    await until(lambda: _has(engine, tokens=3, running=3, waiting=5))
    await engine.abort(works[7].request)  # it waits for a slot: that wait ends too
    with pytest.raises(Interrupted):
        await tasks[7]
    tasks[0].cancel()
    await until(lambda: _has(engine, tokens=4, running=3, waiting=3, decodes_started=4))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await _has(engine, running=0, waiting=0, kv_tokens=0)


async def test_cancelled_work_makes_no_further_token(start: Start) -> None:
    engine = await start()
    stream = engine.decode(work_of(prompt_of(9, "stopped"), greedy(1000)))
    for _ in range(5):
        await anext(stream)
    await stream.aclose()
    made = (await engine.stats())["tokens"]
    for _ in range(20):
        await asyncio.sleep(0)
    assert (await engine.stats())["tokens"] == made < 1000


async def test_executions_are_counted(start: Start) -> None:
    engine, prompt = await start(), prompt_of(64, "counted")
    assert await _has(engine, prefills_started=0, decodes_started=0, tokens=0)  # the start's probe is none
    await engine.prefill(work_of(prompt))
    await engine.prefill(work_of(prompt[:20]))
    await collect(engine, work_of(prompt))
    assert await _has(engine, prefills_started=2, prefills_done=2, decodes_started=1, decodes_done=1, tokens=12)


async def test_one_request_may_run_twice_and_abort_ends_both(start: Start) -> None:
    """A stale attempt may still run when the next one begins."""
    engine, work = await start("decode.hang_after=2"), work_of(prompt_of(9, "both"))
    tasks = [asyncio.create_task(collect(engine, work)) for _ in range(2)]
    await until(lambda: _has(engine, tokens=4))
    await engine.abort(work.request)
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ended] == [Interrupted] * 2


async def test_close_ends_running_work(start: Start) -> None:
    engine = await start("decode.hang_after=1")
    task = asyncio.create_task(collect(engine, work_of(prompt_of(9, "closed"))))
    await until(lambda: _has(engine, tokens=1))
    await engine.close()
    with pytest.raises(Unavailable, match="closed"):
        await task


async def test_nothing_runs_before_the_start() -> None:
    engine = SimEngine(SPEC, EngineSettings(kind="sim"))
    with pytest.raises(Unavailable, match="not started"):
        await engine.prefill(work_of(prompt_of(9, "early")))
    await engine.close()


async def test_thousands_of_tokens_from_fifty_streams_are_the_models_own(start: Start) -> None:
    engine = await start(max_num_seqs=50, sim_profile="llama3-8b-h100*0.001")
    works = [work_of(prompt_of(20, f"stream {number}"), Sampling(max_tokens=100, seed=number)) for number in range(50)]
    got: list[Got] = await asyncio.gather(*(collect(engine, work) for work in works))
    assert [(one.ids, one.text, one.done.finish_reason) for one in got] == [
        answer(TOKENIZER, work.prompt, work.sampling, SPEC.max_model_len) for work in works
    ]


UNRUNNABLE: list[dict[str, Any]] = [
    {"prompt": ()},
    {"prompt": (-1,)},
    {"prompt": (2048,)},
    {"salt": "a/b"},
    {"salt": "A0"},
    {"salt": "a" * 129},
]


@pytest.mark.parametrize("change", UNRUNNABLE)
async def test_work_that_cannot_run_is_rejected(start: Start, change: dict[str, Any]) -> None:
    engine = await start()
    fields: dict[str, Any] = {"request": "r", "prompt": (1, 2), "sampling": greedy(), "salt": "a0"}
    await collect(engine, Work(**fields))
    with pytest.raises(Rejected):
        await engine.prefill(Work(**fields | change))


async def test_a_prompt_too_long_is_told_by_how_much(start: Start) -> None:
    engine = await start()
    with pytest.raises(Rejected, match=r"2048 tokens.*holds 2047") as caught:
        await engine.prefill(work_of(prompt_of(2048, "long")))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(Rejected) as caught:
        await engine.prefill(work_of((1,), greedy(0)))
    assert caught.value.param == "max_tokens"


# the contract, the factory


def test_the_kv_contract_is_of_what_kv_depends_on() -> None:
    def changed(**fields: Any) -> str:
        return contract(ModelSpec(**{name: getattr(SPEC, name) for name in SPEC.__struct_fields__} | fields))

    assert changed() == contract(SPEC)
    assert changed(max_model_len=99) == contract(SPEC)
    different = [changed(id="x"), changed(vocab_size=999), changed(block_tokens=16), changed(chunk_tokens=64)]
    assert len({contract(SPEC), *different}) == 5


async def test_the_factory_makes_a_sim_without_importing_vllm() -> None:
    script = """
import sys
from pdq.engines.factory import create
from pdq.settings import EngineSettings, KvSettings, ModelSpec
spec = ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=2048, vocab_size=2048)
print(create(spec, "both", EngineSettings(kind="sim"), KvSettings()).info.name)
print([name for name in ("vllm", "lmcache", "torch", "transformers") if name in sys.modules])
"""
    ran = await asyncio.to_thread(run_python, script)
    assert (ran.returncode, ran.stdout.split("\n")[:2]) == (0, ["sim/1", "[]"]), ran.stderr
