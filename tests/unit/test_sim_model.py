"""The simulated model: its tokens follow from all before them, its text from its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from pdq.bytes_tokenizer import END, BytesTokenizer
from pdq.engines.sim_model import START, Answer, Generation, StopStrings, advance, answer
from pdq.messages import Sampling

from tests.contract.suite import greedy, prompt_of

VOCAB = 2048
TOKENIZER = BytesTokenizer(VOCAB)
CONTEXT = 10_000


def answered(prompt: Sequence[int], sampling: Sampling, context: int = CONTEXT) -> Answer:
    return answer(TOKENIZER, prompt, sampling, context)


# stop strings and text

SMALL = st.text(alphabet="abc", max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is left of a text: up to the stop string that completes first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends, key=lambda end: end[0])[1]], True) if ends else (text, False)


@given(st.lists(SMALL), STOPS)
def test_deltas_join_to_the_text_cut_at_the_stop(pieces: list[str], stops: list[str]) -> None:
    holder, shown, matched = StopStrings(stops), "", False
    for index, piece in enumerate(pieces):
        delta, matched = holder.push(piece, check=True, final=index == len(pieces) - 1)
        shown += delta
        if matched:
            break
        assert cut("".join(pieces), stops)[0].startswith(shown), "shown too early"
    assert (shown, matched) == cut("".join(pieces), stops)


@given(st.lists(SMALL, min_size=1), STOPS, st.integers(0, 5))
def test_a_stop_string_counts_once_it_ends_after_min_tokens(pieces: list[str], stops: list[str], least: int) -> None:
    holder, shown, seen = StopStrings(stops), "", ""
    for index, piece in enumerate(pieces):
        delta, matched = holder.push(piece, check=index >= least, final=index == len(pieces) - 1)
        shown, seen = shown + delta, seen + piece
        ends = [seen[: len(seen) - back].endswith(stop) for back in range(len(piece)) for stop in stops]
        assert matched == (index >= least and any(ends))
        if matched:
            assert seen.startswith(shown)
            return
    assert shown == seen


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    holder = StopStrings(("END", "\n\n"))
    assert holder.push("a\n", check=True, final=False) == ("a", False)
    assert holder.push("bEN", check=True, final=False) == ("\nb", False)
    assert holder.push("d", check=True, final=False) == ("ENd", False)
    assert holder.push("x\n\ny", check=True, final=False) == ("x", True)


SAMPLED = st.builds(
    Sampling, max_tokens=st.integers(1, 60), seed=st.integers(0, 2**63 - 1), min_tokens=st.integers(0, 20)
)
PROMPTS = st.integers(0, 10_000).map(lambda number: prompt_of(4, f"prompt {number}"))


@given(PROMPTS, SAMPLED)
def test_an_answers_text_is_its_ids_decoded(prompt: tuple[int, ...], sampling: Sampling) -> None:
    got = answered(prompt, sampling)
    assert got.text == TOKENIZER.decode(got.ids)
    assert got.finish_reason == ("stop" if END in got.ids else "length")


@given(PROMPTS, SAMPLED, st.integers(0, 80), st.integers(1, 6), st.text(alphabet=" aeo", max_size=2))
def test_a_stop_string_cuts_text_and_ids(
    prompt: tuple[int, ...], sampling: Sampling, start: int, size: int, other: str
) -> None:
    free = answered(prompt, msgspec.structs.replace(sampling, min_tokens=0))
    stops = [stop for stop in (free.text[start : start + size], other) if stop]
    got = answered(prompt, msgspec.structs.replace(sampling, min_tokens=0, stop=tuple(stops)))
    assert (got.text, got.finish_reason == "stop") == (
        cut(free.text, stops)[0],
        cut(free.text, stops)[1] or free.finish_reason == "stop",
    )
    assert got.ids == free.ids[: len(got.ids)]
    assert len(TOKENIZER.decode(got.ids[:-1])) <= len(got.text) + max(map(len, stops), default=0)


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    for opened in (b"\xe4\xb8", b"\xe4", b"\xf0\x9f", b"\xc3"):
        for fill in range(20):
            got = answered((fill, *b"caf", *opened), greedy(4))
            first = (opened + b"".join(map(TOKENIZER.token_bytes, got.ids))).decode("utf-8", "replace")[0]
            assert got.text[0] == first != "\ufffd"


def test_a_limit_inside_a_character_shows_that_it_is_cut() -> None:
    texts = [answered(prompt_of(4, f"cut {number}"), greedy(9)).text for number in range(200)]
    assert any(text.endswith("\ufffd") for text in texts)
    assert not any("\ufffd" in text[:-1] for text in texts)


def test_characters_are_split_over_tokens_and_come_out_whole() -> None:
    texts = [answered(prompt_of(5, f"u{n}"), greedy(200)) for n in range(40)]
    split = sum(TOKENIZER.decode([first]).endswith("\ufffd") for got in texts for first in got.ids[:-1] if first >= 256)
    assert split > 100
    assert not any("\ufffd" in got.text[:-1] for got in texts)


# the next token


@given(PROMPTS, st.integers(1, 40), st.integers(0, 2**31))
def test_an_answer_continues_from_any_of_its_tokens(prompt: tuple[int, ...], shown: int, seed: int) -> None:
    """What a restart after a crash relies on: with prompt and shown tokens as its prompt, the rest is the same."""
    generation, state = Generation(TOKENIZER, prompt, Sampling(max_tokens=60, seed=seed), CONTEXT), START
    for token in prompt:
        state = advance(state, token)
    ids: list[int] = []
    text = ""
    while len(ids) < shown and not generation.finish:
        tokens = generation.step(state)
        ids, text, state = [*ids, *tokens.ids], text + tokens.text, advance(state, tokens.ids[0])
    if generation.finish:
        return
    rest = answered((*prompt, *ids), Sampling(max_tokens=60 - shown, seed=seed))
    whole = answered(prompt, Sampling(max_tokens=60, seed=seed))
    assert ((*ids, *rest.ids), text + rest.text, rest.finish_reason) == whole


def test_any_changed_token_changes_the_answer() -> None:
    prompt = prompt_of(50, "splice")
    before = answered(prompt, greedy(8)).ids
    for place in range(50):
        spliced = (*prompt[:place], prompt[place] ^ 1, *prompt[place + 1 :])
        assert answered(spliced, greedy(8)).ids != before


def test_the_seed_counts_only_above_temperature_zero() -> None:
    prompt = prompt_of(5, "seeds")
    ids = {
        temperature: {answered(prompt, greedy(9, temperature=temperature, seed=s)).ids for s in range(5)}
        for temperature in (0.0, 0.7)
    }
    assert (len(ids[0.0]), len(ids[0.7])) == (1, 5)


def test_about_one_token_in_256_ends_an_answer() -> None:
    ends = [answered((n, n), Sampling(max_tokens=64)).finish_reason for n in range(400)]
    assert 50 < ends.count("stop") < 130


def test_an_end_token_among_the_words_is_no_likelier() -> None:
    tokenizer = BytesTokenizer(260, (256, 257))
    answers = [answer(tokenizer, (n, n), Sampling(max_tokens=64), CONTEXT) for n in range(200)]
    assert 20 < sum(got.finish_reason == "stop" for got in answers) < 80
    assert {got.ids[-1] for got in answers if got.finish_reason == "stop"} == {256, 257}


def early() -> tuple[tuple[int, ...], Answer]:
    """A prompt, and its answer, which an end token ends after a few of at most 64 tokens."""
    answers = ((prompt, answered(prompt, Sampling(max_tokens=64))) for prompt in ((n,) for n in range(256)))
    return next((prompt, got) for prompt, got in answers if 5 < len(got.ids) < 20)


def test_an_end_token_ends_an_answer_unless_it_is_ignored() -> None:
    prompt, short = early()
    assert (short.ids[-1], short.finish_reason) == (END, "stop")
    longer = answered(prompt, Sampling(max_tokens=64, ignore_eos=True))
    assert (len(longer.ids), longer.finish_reason) == (64, "length")
    assert longer.ids[: len(short.ids)] == short.ids
    assert longer.text.startswith(short.text)


def test_min_tokens_forbids_the_end() -> None:
    prompt, short = early()
    longer = answered(prompt, Sampling(max_tokens=64, min_tokens=30))
    assert len(longer.ids) >= 30
    assert longer.ids[: len(short.ids) - 1] == short.ids[:-1]
    assert END not in longer.ids[:30]


def test_the_context_bounds_an_answer() -> None:
    got = answered((1,), greedy(64), context=11)
    assert (len(got.ids), got.finish_reason) == (10, "length")
