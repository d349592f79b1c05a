"""What every engine must do, whatever it is: subclass `EngineContract` in a test file, and give it engines.

A subclass overrides two fixtures: `bench`, and `disposable`, an engine that a test may close. Costly engines may
outlive a test (`scope="class"` with `pytest.mark.asyncio(loop_scope="class")` on the subclass): each test uses
prompts and request names of its own, and leaves nothing running.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import NamedTuple

import msgspec
import pytest
from pdq.engines.base import Done, Engine, PrefillResult, Tokens, Work
from pdq.errors import Interrupted, Rejected, Unavailable
from pdq.messages import Promise, Sampling, TokenLogprob

BOUND_S = 120.0
POLL_S = 0.01
SALT, OTHER_SALT = "5a17" * 16, "07e2" * 16
LOADED = {31: 0, 32: 31, 33: 32, 64: 63, 200: 192, 1000: 992}
"""Tokens of a prompt that decode loads after prefill has stored it, with chunks of 32."""

_numbers = itertools.count()


class Bench(NamedTuple):
    """Two started engines that share a KV tier, with chunks of 32 tokens and a context of at least 1,100.

    `corrupt` damages all KV stored so far, where the tier can be damaged.
    """

    prefill: Engine
    decode: Engine
    corrupt: Callable[[], None] | None = None


class Got(NamedTuple):
    """A decode's whole output."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    done: Done


def prompt_of(size: int, name: str) -> tuple[int, ...]:
    """`size` token ids that are fixed by `name`: small ones, which every vocabulary has (printable ASCII in bytes)."""
    random = Random(name)
    return tuple(random.randrange(32, 127) for _ in range(size))


def work_of(
    prompt: Sequence[int], sampling: Sampling | None = None, salt: str = SALT, promise: Promise | None = None
) -> Work:
    return Work(
        request=f"r-{next(_numbers)}",
        prompt=tuple(prompt),
        sampling=sampling or greedy(),
        salt=salt,
        promise=promise,
    )


def greedy(max_tokens: int = 12, **more: object) -> Sampling:
    """Sampling whose length is certain: no end token stops it."""
    return Sampling(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **more})  # type: ignore[arg-type]


async def collect(engine: Engine, work: Work) -> Got:
    """Decode to the end, checking that `Done` comes last and once."""
    tokens: list[Tokens] = []
    done: list[Done] = []
    async with asyncio.timeout(BOUND_S):
        async for item in engine.decode(work):
            assert not done, "something came after Done"
            if isinstance(item, Done):
                done.append(item)
            else:
                tokens.append(item)
    assert len(done) == 1
    return Got(
        ids=tuple(token for item in tokens for token in item.ids),
        text="".join(item.text for item in tokens),
        logprobs=tuple(logprob for item in tokens for logprob in item.logprobs or ()),
        done=done[0],
    )


async def prefilled(engine: Engine, work: Work) -> PrefillResult:
    async with asyncio.timeout(BOUND_S):
        return await engine.prefill(work)


async def idle(engine: Engine) -> None:
    """Wait until nothing runs in an engine and nothing waits."""
    for _ in range(int(BOUND_S / POLL_S)):
        stats = await engine.stats()
        if not stats["running"] and not stats["waiting"]:
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"still busy after {BOUND_S:g} s: {stats}")


class EngineContract:
    """The contract of pdq.engines.base, as tests."""

    @pytest.fixture
    async def bench(self) -> Bench:
        raise NotImplementedError

    @pytest.fixture
    async def disposable(self) -> Engine:
        raise NotImplementedError

    def test_both_engines_say_the_same_of_the_model(self, bench: Bench) -> None:
        prefill, decode = bench.prefill.info, bench.decode.info
        assert len(decode.contract) == 64
        assert prefill.contract == decode.contract
        assert decode.chunk_tokens == 32
        assert decode.chunk_tokens % decode.block_tokens == 0
        assert decode.slots >= 2
        assert decode.kv_bytes_per_token > 0
        assert decode.max_model_len >= 1100

    @pytest.mark.parametrize(("size", "loaded"), LOADED.items())
    async def test_decode_loads_what_prefill_stored(self, bench: Bench, size: int, loaded: int) -> None:
        work = work_of(prompt_of(size, f"table {size}"))
        stored = await prefilled(bench.prefill, work)
        assert stored.stored_tokens == size // 32 * 32
        assert stored.stored_bytes == stored.stored_tokens * bench.prefill.info.kv_bytes_per_token
        assert stored.cause == ("" if stored.stored_tokens else "short_prompt")
        promised = min(stored.stored_tokens, size - 1)
        got = await collect(bench.decode, work_of(work.prompt, promise=Promise(tokens=promised)))
        assert got.done.loaded_tokens == promised == loaded
        assert got.done.local_tokens == 0

    async def test_held_is_what_decode_could_load(self, bench: Bench) -> None:
        work = work_of(prompt_of(200, "held"))
        assert await bench.decode.held(work) == 0
        await prefilled(bench.prefill, work)
        assert await bench.decode.held(work) == 192
        longer = work_of((*work.prompt, *prompt_of(100, "and more")))
        assert await bench.decode.held(longer) == 192
        assert await bench.decode.held(work_of(work.prompt[:100])) == 96
        assert await bench.decode.held(work_of(work.prompt[:31])) == 0
        assert await bench.decode.held(work_of(work.prompt, salt=OTHER_SALT)) == 0
        assert await bench.decode.held(work_of(work.prompt[1:])) == 0

    async def test_without_prefill_nothing_is_loaded(self, bench: Bench) -> None:
        got = await collect(bench.decode, work_of(prompt_of(200, "not prefilled")))
        assert got.done.loaded_tokens == 0
        assert len(got.ids) == 12

    async def test_a_false_promise_costs_no_token(self, bench: Bench) -> None:
        work = work_of(prompt_of(200, "never stored"), promise=Promise(tokens=192))
        got = await collect(bench.decode, work)
        assert got.done.loaded_tokens == 0
        assert len(got.ids) == 12

    async def test_salts_isolate(self, bench: Bench) -> None:
        prompt = prompt_of(100, "salted")
        await prefilled(bench.prefill, work_of(prompt))
        strange = await collect(bench.decode, work_of(prompt, salt=OTHER_SALT))
        own = await collect(bench.decode, work_of(prompt))
        assert (strange.done.loaded_tokens, own.done.loaded_tokens) == (0, 96)
        assert strange.ids == own.ids

    async def test_kv_changes_neither_tokens_nor_logprobs(self, bench: Bench) -> None:
        prompt, sampling = prompt_of(200, "compared"), greedy(16, logprobs=3)
        await prefilled(bench.prefill, work_of(prompt))
        loaded = await collect(bench.decode, work_of(prompt, sampling))
        plain = await collect(bench.decode, work_of(prompt, sampling, salt=OTHER_SALT))
        assert (loaded.done.loaded_tokens, plain.done.loaded_tokens) == (192, 0)
        assert (loaded.ids, loaded.text) == (plain.ids, plain.text)
        assert loaded.logprobs[0].logprob == pytest.approx(plain.logprobs[0].logprob, abs=1e-3)

    async def test_a_second_prefill_stores_the_same(self, bench: Bench) -> None:
        prompt = prompt_of(100, "twice")
        first = await prefilled(bench.prefill, work_of(prompt))
        second = await prefilled(bench.prefill, work_of(prompt))
        assert first.stored_tokens == second.stored_tokens == 96

    async def test_corrupted_kv_is_a_miss(self, bench: Bench) -> None:
        if bench.corrupt is None:
            pytest.skip("this tier cannot be damaged from outside")
        prompt = prompt_of(100, "corrupted")
        await prefilled(bench.prefill, work_of(prompt))
        plain = await collect(bench.decode, work_of(prompt, salt=OTHER_SALT))
        bench.corrupt()
        got = await collect(bench.decode, work_of(prompt))
        assert got.done.loaded_tokens == 0
        assert got.ids == plain.ids

    async def test_phases_tell_what_was_done(self, bench: Bench) -> None:
        prompt = prompt_of(100, "phases")
        stored = await prefilled(bench.prefill, work_of(prompt))
        got = await collect(bench.decode, work_of(prompt))
        prefill = {phase.name: phase for phase in stored.phases}
        decode = {phase.name: phase for phase in got.done.phases}
        assert {"kv.lookup", "engine.prefill", "kv.store"} <= prefill.keys()
        assert {"kv.lookup", "kv.load", "engine.decode"} <= decode.keys()
        assert prefill["kv.store"].attributes["pdq.kv.tokens"] == 96
        assert decode["kv.load"].attributes["pdq.kv.tokens"] == 96
        assert all(phase.end_ns >= phase.start_ns for phase in (*stored.phases, *got.done.phases))
        names, times = zip(*decode["engine.decode"].events, strict=True)
        assert names == ("first_token", "second_token", "last_token")
        assert list(times) == sorted(times)

    async def test_greedy_answers_repeat_whatever_the_seed(self, bench: Bench) -> None:
        prompt = prompt_of(40, "greedy")
        first = await collect(bench.decode, work_of(prompt, greedy(seed=1)))
        second = await collect(bench.decode, work_of(prompt, greedy(seed=2)))
        assert (first.ids, first.text) == (second.ids, second.text)

    async def test_sampled_answers_follow_the_seed(self, bench: Bench) -> None:
        prompt = prompt_of(40, "sampled")
        first, again, other = [
            await collect(bench.decode, work_of(prompt, greedy(24, temperature=1.0, seed=seed))) for seed in (7, 7, 8)
        ]
        assert first.ids == again.ids
        assert first.ids != other.ids

    async def test_logprobs_as_asked_for(self, bench: Bench) -> None:
        prompt = prompt_of(40, "logprobs")
        none, chosen, three = [
            await collect(bench.decode, work_of(prompt, greedy(logprobs=count))) for count in (None, 0, 3)
        ]
        assert none.logprobs == ()
        assert [len(entry.top) for entry in chosen.logprobs] == [0] * 12
        assert [len(entry.top) for entry in three.logprobs] == [3] * 12
        for entry in three.logprobs:
            ranked = [top.logprob for top in entry.top]
            assert ranked == sorted(ranked, reverse=True)
            assert entry.logprob <= 0
            assert entry.logprob == pytest.approx(ranked[0])  # greedy takes the likeliest

    async def test_an_answer_goes_on_after_what_was_shown(self, bench: Bench) -> None:
        prompt, sampling = prompt_of(60, "gone on with"), greedy(24, logprobs=1)
        items: list[Tokens] = []
        async for item in bench.decode.decode(work_of(prompt, sampling)):
            if isinstance(item, Tokens):
                items.append(item)
        whole = await collect(bench.decode, work_of(prompt, sampling))
        clean = [place for place, item in enumerate(items, 1) if not item.held and place < len(items)]
        assert clean, "no place where the text is whole"
        for place in (clean[0], clean[len(clean) // 2], clean[-1]):
            shown = tuple(token for item in items[:place] for token in item.ids)
            text = "".join(item.text for item in items[:place])
            rest = await collect(bench.decode, msgspec.structs.replace(work_of(prompt, sampling), shown=shown))
            assert shown + rest.ids == whole.ids
            assert text + rest.text == whole.text
            assert [entry.token for entry in rest.logprobs] == [e.token for e in whole.logprobs[len(shown) :]]
            assert rest.done.finish_reason == whole.done.finish_reason

    async def test_an_answer_that_was_all_shown_just_ends(self, bench: Bench) -> None:
        prompt = prompt_of(60, "all shown")
        whole = await collect(bench.decode, work_of(prompt, greedy(6)))
        ended = await collect(bench.decode, msgspec.structs.replace(work_of(prompt, greedy(6)), shown=whole.ids))
        assert (ended.ids, ended.text, ended.done.finish_reason) == ((), "", "length")
        stop = greedy(20, stop_token_ids=(whole.ids[-1],))
        ended = await collect(bench.decode, msgspec.structs.replace(work_of(prompt, stop), shown=whole.ids))
        assert (ended.ids, ended.done.finish_reason) == ((), "stop")

    async def test_max_tokens_of_one(self, bench: Bench) -> None:
        got = await collect(bench.decode, work_of(prompt_of(40, "one"), greedy(1)))
        assert len(got.ids) == 1
        assert got.done.finish_reason == "length"

    async def test_the_context_ends_an_answer(self, bench: Bench) -> None:
        context = bench.decode.info.max_model_len
        got = await collect(bench.decode, work_of(prompt_of(context - 5, "full"), greedy(50)))
        assert len(got.ids) == 5
        assert got.done.finish_reason == "length"

    async def test_a_stop_string_ends_the_text_before_it(self, bench: Bench) -> None:
        prompt = prompt_of(40, "stops")
        free = await collect(bench.decode, work_of(prompt, greedy(40)))
        stop = free.text[len(free.text) // 2 :][:4]
        got = await collect(bench.decode, work_of(prompt, greedy(40, stop=(stop,))))
        assert got.text == free.text[: free.text.index(stop)]
        assert got.done.finish_reason == "stop"
        assert got.ids == free.ids[: len(got.ids)]
        assert len(got.ids) < 40

    async def test_text_held_back_for_a_stop_string_comes_at_the_end(self, bench: Bench) -> None:
        prompt = prompt_of(40, "held")
        free = await collect(bench.decode, work_of(prompt, greedy(8)))
        got = await collect(bench.decode, work_of(prompt, greedy(8, stop=(free.text[-3:] + "\x00",))))
        assert got.text == free.text
        assert got.done.finish_reason == "length"

    async def test_a_stop_token_is_kept_without_its_text(self, bench: Bench) -> None:
        prompt = prompt_of(40, "stop token")
        free = await collect(bench.decode, work_of(prompt))
        end = free.ids.index(free.ids[6]) + 1
        before = await collect(bench.decode, work_of(prompt, greedy(end)))
        got = await collect(bench.decode, work_of(prompt, greedy(stop_token_ids=(free.ids[6],))))
        assert got.ids == free.ids[:end]
        assert len(got.text) < len(before.text)
        assert got.done.finish_reason == "stop"

    async def test_min_tokens_outlasts_a_stop_token(self, bench: Bench) -> None:
        prompt = prompt_of(40, "least")
        free = await collect(bench.decode, work_of(prompt))
        stops = (free.ids[0],)
        assert len((await collect(bench.decode, work_of(prompt, greedy(stop_token_ids=stops)))).ids) == 1
        got = await collect(bench.decode, work_of(prompt, greedy(stop_token_ids=stops, min_tokens=6)))
        assert len(got.ids) >= 6
        assert not set(stops) & set(got.ids[:6])

    async def test_min_tokens_outlasts_a_stop_string(self, bench: Bench) -> None:
        prompt = prompt_of(40, "least text")
        free = await collect(bench.decode, work_of(prompt, greedy(10)))
        stop = (free.text[:2],)
        assert (await collect(bench.decode, work_of(prompt, greedy(10, stop=stop)))).text == ""
        got = await collect(bench.decode, work_of(prompt, greedy(10, stop=stop, min_tokens=8)))
        assert len(got.ids) >= 8
        assert got.text.startswith(stop[0])

    async def test_as_many_run_together_as_there_are_slots_and_more_wait(self, bench: Bench) -> None:
        prompts = [prompt_of(20 + index, f"together {index}") for index in range(2 * bench.decode.info.slots)]
        alone = [await collect(bench.decode, work_of(prompt)) for prompt in prompts]
        together = await asyncio.gather(*(collect(bench.decode, work_of(prompt)) for prompt in prompts))
        assert [got.text for got in together] == [got.text for got in alone]

    async def test_cancelling_frees_the_slots(self, bench: Bench) -> None:
        long = greedy(1000)
        begun = asyncio.Semaphore(0)

        async def endless(number: int) -> None:
            async for _ in bench.decode.decode(work_of(prompt_of(20, f"endless {number}"), long)):
                begun.release()
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(endless(number)) for number in range(bench.decode.info.slots)]
        async with asyncio.timeout(BOUND_S):
            for _ in tasks:
                await begun.acquire()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        await idle(bench.decode)
        assert len((await collect(bench.decode, work_of(prompt_of(20, "after a cancel")))).ids) == 12

    async def test_an_answer_not_read_to_its_end_frees_its_slot(self, bench: Bench) -> None:
        for number in range(bench.decode.info.slots + 1):
            stream = bench.decode.decode(work_of(prompt_of(20, f"left {number}"), greedy(1000)))
            async with asyncio.timeout(BOUND_S), aclosing(stream):
                assert isinstance(await anext(stream), Tokens)
        await idle(bench.decode)

    async def test_abort_ends_a_decode_without_done(self, bench: Bench) -> None:
        work = work_of(prompt_of(20, "aborted"), greedy(1000))
        items: list[Tokens | Done] = []
        with pytest.raises(Interrupted):
            async with asyncio.timeout(BOUND_S):
                async for item in bench.decode.decode(work):
                    items.append(item)
                    if len(items) == 1:
                        await bench.decode.abort(work.request)
        assert not any(isinstance(item, Done) for item in items)
        await idle(bench.decode)

    async def test_abort_of_an_unknown_request_does_nothing(self, bench: Bench) -> None:
        await bench.decode.abort("nobody")
        await bench.decode.check()

    async def test_work_that_can_never_run_is_rejected(self, bench: Bench) -> None:
        info = bench.decode.info
        for prompt in ((), prompt_of(info.max_model_len, "long"), (info.vocab_size,)):
            with pytest.raises(Rejected):
                await collect(bench.decode, work_of(prompt))
        await bench.decode.check()

    async def test_close_is_idempotent_and_ends_service(self, disposable: Engine) -> None:
        await disposable.check()
        await disposable.close()
        await disposable.close()
        with pytest.raises(Unavailable):
            await disposable.check()
