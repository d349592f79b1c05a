"""Right answers: what prefill and decode give together is what a plain engine gives alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from pdq.engines.base import Tokens, Work
from pdq.errors import Rejected, Unavailable
from pdq.messages import Sampling
from pdq.settings import ModelSpec
from tokenizers import Tokenizer

from tests.e2e.conftest import Answer, Pair, answer, greedy

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("pair", ["engine_driven"], indirect=True),
]

PLAIN_TIMEOUT_S = 300.0
MAX_TOKENS = 24

STORY = "The old lighthouse keeper wrote one line in his book every night, and every line was about the weather. "
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List the first ten prime numbers.",
    "Explain in one sentence why the sky is blue.",
    "Translate 'good morning' into Spanish.",
    f"Summarise this in one sentence: {STORY * 12}",
)
TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "🎉🚀 Übermut, 你好世界, こんにちは, Привет, مرحبا — naïve café: ",
    '{"name": "Ada", "born": 1815, "tags": ["mathematics", "engines"], "died":',
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25",
)
CUT = "\ufffd"
"""What stands for a character whose tokens are not all there."""
COUNTING = "one two three four five six one two three four five six one two three four five six one two"


class Plain(msgspec.Struct):
    ids: list[int]
    logprobs: list[float]


def chat(tokenizer: Tokenizer, question: str) -> tuple[int, ...]:
    return ids_of(tokenizer, f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def work(prompt: tuple[int, ...], salt: str, sampling: Sampling, request: str = "r") -> Work:
    return Work(request=request, prompt=prompt, sampling=sampling, salt=salt)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Ten, of 15 to about 280 tokens; one of a whole number of chunks."""
    varied = [chat(tokenizer, question) for question in QUESTIONS] + [ids_of(tokenizer, text) for text in TEXTS]
    return [*varied[:-1], (varied[-1] * 2)[:64]]


@pytest.fixture(scope="module", autouse=True)
def plain(spec: ModelSpec, prompts: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory) -> list[Plain]:
    """A plain engine's answers. Autouse: it has ended before the pair starts; a small machine cannot hold all three."""
    directory = tmp_path_factory.mktemp("plain")
    job, result = directory / "job.json", directory / "result.json"
    job.write_text(json.dumps({"prompts": prompts, "max_tokens": MAX_TOKENS}))
    command = [sys.executable, "-m", "tests.e2e.plain_engine", spec.path, str(job), str(result)]
    with (directory / "log").open("wb") as log:
        subprocess.run(
            command, cwd=Path(__file__).parents[2], check=True, timeout=PLAIN_TIMEOUT_S, stdout=log, stderr=log
        )
    return msgspec.json.decode(result.read_bytes(), type=list[Plain])


async def test_ten_prompts_are_answered_as_by_a_plain_engine(
    pair: Pair, plain: list[Plain], prompts: list[tuple[int, ...]], salt: str
) -> None:
    for prompt, expected in zip(prompts, plain, strict=True):
        stored, answered = await pair.handoff(work(prompt, salt, greedy(MAX_TOKENS, logprobs=0)))
        assert answered.done.loaded_tokens == min(stored.stored_tokens, len(prompt) - 1)
        assert answered.ids == expected.ids
        assert answered.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


async def test_the_same_ten_at_once(pair: Pair, plain: list[Plain], prompts: list[tuple[int, ...]], salt: str) -> None:
    works = [work(prompt, salt, greedy(MAX_TOKENS), f"r{index}") for index, prompt in enumerate(prompts)]
    results = await asyncio.gather(*(pair.handoff(each) for each in works))
    assert [answered.ids for _, answered in results] == [expected.ids for expected in plain]


async def test_sixteen_decodes_at_once_stream_whole_answers(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    prompts = [chat(tokenizer, f"Say the number {number}.") for number in range(16)]
    works = [work(prompt, salt, greedy(12, ignore_eos=True), f"r{index}") for index, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(answer(pair.decode, each) for each in works))
    for each in answers:
        assert (len(each.ids), each.done.finish_reason) == (12, "length")
        assert each.text == tokenizer.decode(each.ids)


async def test_an_answer_ends_itself(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    _, answered = await pair.handoff(work(chat(tokenizer, QUESTIONS[0]), salt, greedy(100)))
    assert "Paris" in answered.text
    assert answered.done.finish_reason == "stop"
    assert len(answered.ids) < 100


async def test_one_token(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    _, answered = await pair.handoff(work(chat(tokenizer, QUESTIONS[0]), salt, greedy(1, logprobs=2)))
    assert (len(answered.ids), answered.done.finish_reason) == (1, "length")
    assert [name for name, _ in answered.done.phases[-1].events] == ["first_token", "last_token"]


async def test_first_token_has_its_logprobs(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    _, answered = await pair.handoff(work(chat(tokenizer, QUESTIONS[0]), salt, greedy(3, logprobs=3)))
    entries = [entry for delta in answered.deltas for entry in delta.logprobs or ()]
    assert len(entries) == len(answered.ids) == 3
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0].logprob == entry.logprob < 0.0
        assert entry.top[0].logprob > entry.top[1].logprob > entry.top[2].logprob


async def test_stop_strings_never_show(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    """One of several tokens, which was shown in no delta before it was whole."""
    prompt = ids_of(tokenizer, COUNTING)
    free = await answer(pair.decode, work(prompt, salt, greedy(12)))
    assert " four five" in free.text
    _, answered = await pair.handoff(work(prompt, salt, greedy(12, stop=[" four five"])))
    assert answered.done.finish_reason == "stop"
    assert answered.text == free.text.partition(" four five")[0]


async def test_stop_token_ids(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    (four,) = ids_of(tokenizer, " four")
    answered = await answer(pair.decode, work(ids_of(tokenizer, COUNTING), salt, greedy(12, stop_token_ids=[four])))
    assert (answered.ids[-1], answered.done.finish_reason) == (four, "stop")


@pytest.mark.parametrize("pattern", ["🎉🚀🌍", "你好世界"])
async def test_characters_over_token_borders_come_out_whole(
    pair: Pair, tokenizer: Tokenizer, salt: str, pattern: str
) -> None:
    """Each of these characters is two or three tokens: a chunk of the prompt, and deltas, end within one."""
    prompt = ids_of(tokenizer, pattern * 12)
    assert tokenizer.decode(prompt[:32]).endswith(CUT)
    stored, answered = await pair.handoff(work(prompt, salt, greedy(40, ignore_eos=True)))
    assert answered.done.loaded_tokens == stored.stored_tokens > 0
    whole = tokenizer.decode(answered.ids).rstrip(CUT)
    assert sum(whole.count(character) for character in pattern.strip()) >= 3
    assert answered.text.rstrip(CUT) == whole
    assert not any(CUT in delta.text for delta in answered.deltas[:-1])


async def test_an_answer_goes_on_after_what_was_shown(
    pair: Pair, prompts: list[tuple[int, ...]], tokenizer: Tokenizer, salt: str
) -> None:
    """As after a crash: from any place where its text is whole, with characters over token borders among them."""
    emoji = ids_of(tokenizer, "Repeat exactly: 🎉🚀🎉🚀🎉🚀 你好世界 🎉🚀🎉🚀🎉🚀 你好世界 🎉🚀🎉🚀")
    for number, prompt in enumerate([*prompts[:4], emoji]):
        sampling = greedy(20, ignore_eos=True)
        whole = await answer(pair.decode, work(prompt, salt, sampling, f"whole-{number}"))
        clean = [place for place, delta in enumerate(whole.deltas, 1) if not delta.held and place < len(whole.deltas)]
        for place in (clean[0], clean[len(clean) // 2]):
            shown = tuple(id for delta in whole.deltas[:place] for id in delta.ids)
            text = "".join(delta.text for delta in whole.deltas[:place])
            again = work(prompt, salt, sampling, f"again-{number}")
            rest = await answer(pair.decode, msgspec.structs.replace(again, shown=shown))
            assert [*shown, *rest.ids] == whole.ids
            assert text + rest.text == whole.text
            assert rest.done.finish_reason == whole.done.finish_reason


async def test_text_that_is_held_back_is_marked(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    """Wherever a record says that its text is whole, it is."""
    prompt = ids_of(tokenizer, "Repeat exactly: 🎉🚀🎉🚀🎉🚀 你好世界 🎉🚀🎉🚀🎉🚀 你好世界 🎉🚀🎉🚀")
    whole = await answer(pair.decode, work(prompt, salt, greedy(40, ignore_eos=True)))
    ids: list[int] = []
    text, num_held = "", 0
    for delta in whole.deltas:
        ids += delta.ids
        text += delta.text
        num_held += delta.held
        if not delta.held:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert num_held, "no character of this answer lies over a token border"


async def test_a_prompt_of_whole_chunks_sent_again_and_again(
    pair: Pair, prompts: list[tuple[int, ...]], plain: list[Plain], salt: str
) -> None:
    """It is cached whole, here and in the tier: the last token is computed all the same."""
    assert len(prompts[-1]) == 64
    for _ in range(3):
        stored, answered = await pair.handoff(work(prompts[-1], salt, greedy(MAX_TOKENS)))
        assert stored.stored_tokens == 64
        assert answered.done.loaded_tokens + answered.done.local_tokens == 63
        assert answered.ids == plain[-1].ids


@pytest.mark.parametrize("num", [1, 2, 34, 63, 65, 95, 97, 127, 129])
async def test_odd_lengths(pair: Pair, prompts: list[tuple[int, ...]], salt: str, num: int) -> None:
    each = work(prompts[5][:num], salt, greedy(4, ignore_eos=True))
    alone = await answer(pair.decode, msgspec.structs.replace(each, salt="00" * 32))
    _, answered = await pair.handoff(each)
    assert answered.ids == alone.ids


async def test_a_seed_repeats_an_answer(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    async def sampled(seed: int) -> Answer:
        sampling = Sampling(max_tokens=16, temperature=1.0, seed=seed, ignore_eos=True)
        return (await pair.handoff(work(chat(tokenizer, QUESTIONS[1]), salt, sampling)))[1]

    first, again, other = await sampled(7), await sampled(7), await sampled(2**64 - 8)
    assert first.ids == again.ids != other.ids


async def test_sampling_options_reach_the_engine(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    prompt = chat(tokenizer, QUESTIONS[0])
    biased = await answer(pair.decode, work(prompt, salt, greedy(2, logit_bias={100: 100.0})))
    assert biased.ids == [100, 100]
    penalised = await answer(
        pair.decode, work(prompt, salt, greedy(2, logit_bias={100: 50.0, 101: 49.0}, presence_penalty=2.0))
    )
    assert penalised.ids == [100, 101]
    repeated = await answer(
        pair.decode, work(prompt, salt, greedy(2, logit_bias={100: 50.0, 101: 49.0}, repetition_penalty=2.0))
    )
    assert repeated.ids == [100, 101]
    likeliest = await answer(pair.decode, work(prompt, salt, greedy(8)))
    for only_that in ({"top_k": 1}, {"min_p": 1.0}):
        sampled = await answer(pair.decode, work(prompt, salt, greedy(8, temperature=1.0, **only_that)))
        assert sampled.ids == likeliest.ids
    longer = await answer(pair.decode, work(prompt, salt, greedy(30, min_tokens=25)))
    assert len(longer.ids) >= 25


@pytest.mark.parametrize("prompt", [(), (49_152,), (5,) * 2049], ids=["empty", "outside the vocabulary", "too long"])
async def test_what_cannot_run_is_rejected(pair: Pair, salt: str, prompt: tuple[int, ...]) -> None:
    with pytest.raises(Rejected):
        await answer(pair.decode, work(prompt, salt, greedy()))
    await pair.decode.check()


async def test_the_engine_says_what_it_is(pair: Pair) -> None:
    info = pair.decode.info
    assert info.contract == pair.prefill.info.contract
    assert (info.block_tokens, info.chunk_tokens, info.max_model_len, info.vocab_size) == (32, 32, 2048, 49_152)
    assert info.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4


async def test_ctrl_c_is_for_the_front_alone(pair: Pair, tokenizer: Tokenizer, salt: str) -> None:
    (core,) = pair.decode._llm.engine_core.resources.engine_manager.processes
    items = pair.decode.decode(work(chat(tokenizer, STORY), salt, greedy(20, ignore_eos=True)))
    ids = list((await anext(items)).ids)
    os.kill(core.pid, signal.SIGINT)
    async for item in items:
        ids += item.ids if isinstance(item, Tokens) else ()
    assert len(ids) == 20


async def test_a_core_ends_with_its_front_and_a_dead_core_is_unavailable(
    pair: Pair, tokenizer: Tokenizer, salt: str
) -> None:
    """The last test of this module: it closes what a front that is killed leaves closed."""
    running = asyncio.create_task(
        answer(pair.decode, work(chat(tokenizer, STORY), salt, greedy(1500, ignore_eos=True)))
    )
    await asyncio.sleep(0)
    pair.decode._inbox.close()
    async with asyncio.timeout(60.0):
        with pytest.raises(Unavailable):
            await running
        with pytest.raises(Unavailable):
            await answer(pair.decode, work(chat(tokenizer, STORY), salt, greedy()))
        with pytest.raises(Unavailable):
            while True:
                await pair.decode.check()
                await asyncio.sleep(0.05)
    await pair.decode.close()
    with pytest.raises(Unavailable):
        await answer(pair.decode, work(chat(tokenizer, STORY), salt, greedy()))
