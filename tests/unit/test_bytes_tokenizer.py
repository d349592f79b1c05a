"""The bytes tokenizer: every text survives it, every id has a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.bytes_tokenizer import END, BytesTokenizer, word
from pdq.errors import Misconfigured, Rejected

VOCAB = 2048
TOKENIZER = BytesTokenizer(VOCAB)


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == list(text.encode())
    assert END not in ids
    assert TOKENIZER.decode(ids) == text


def test_a_lone_surrogate_is_rejected() -> None:
    with pytest.raises(Rejected, match="character 2"):
        TOKENIZER.encode("ab\ud800")


@given(st.lists(st.integers(0, VOCAB - 1)))
def test_any_ids_have_a_text(ids: list[int]) -> None:
    whole = b"".join(TOKENIZER.token_bytes(token) for token in ids)
    assert TOKENIZER.decode(ids) == whole.decode("utf-8", "replace")


def test_words_are_distinct_and_some_are_cut_inside_a_character() -> None:
    words = [word(number) for number in range(5000)]
    assert len(set(words)) == 5000
    cut = [text for text in words if text.decode("utf-8", "ignore").encode() != text]
    assert {text[-len(text.split(b" ")[-1]) :] for text in cut} == {
        b"\xc3",
        b"\xe4\xb8",
        b"\xe5",
        b"\xf0\x9f\x98",
        b"\xf0\x9f",
    }


def test_end_tokens_have_no_text_and_must_be_in_the_vocabulary() -> None:
    tokenizer = BytesTokenizer(300, (2, 256))
    assert tokenizer.decode([65, 2, 256, 66]) == "AB"
    assert tokenizer.decode([255]) == "\ufffd"
    with pytest.raises(Misconfigured):
        BytesTokenizer(255)
    with pytest.raises(Misconfigured):
        BytesTokenizer(300, (300,))


def test_a_chat_is_plain_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 🌍"}]
    assert TOKENIZER.chat(messages) == "<|system|>\nBe brief.\n<|user|>\nHi 🌍\n<|assistant|>\n"
