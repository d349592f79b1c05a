"""Answers in OpenAI's shapes: deltas, calls, log probabilities, usage, the document that describes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pdq.api.answers import chat_delta, chat_logprobs, completion_logprobs, message, total
from pdq.log import Piece
from pdq.messages import CallDelta, Delta, TokenLogprob, TopLogprob, Usage
from pdq_gateway.app import HANDLERS
from pdq_gateway.openapi import document
from pdq_gateway.progress import Step
from pdq_gateway.shapes import CHAT, COMPLETION, Head, encode

HEAD = Head("chatcmpl-r-1", 1_700_000_000, "org/name")


def plain(value: Any) -> Any:
    return json.loads(encode(value))


def step(*pieces: Piece, **fields: Any) -> Step:
    return Step(7, pieces=pieces, **fields)


def test_text_is_the_content_where_nothing_was_parsed() -> None:
    assert plain(message("hello", [])) == {"role": "assistant", "content": "hello", "refusal": None}
    assert plain(chat_delta("hel", [])) == {"content": "hel"}
    assert not chat_delta("", [])


def test_deltas_join_to_the_message() -> None:
    deltas = [
        Delta(reasoning="hm"),
        Delta(),
        Delta(reasoning="m", content="I call. "),
        Delta(tool_calls=(CallDelta(index=0, id="c-1", name="f", arguments='{"a"'),)),
        Delta(tool_calls=(CallDelta(index=0, arguments=": 1}"), CallDelta(index=1, id="c-2", name="g"))),
        Delta(tool_calls=(CallDelta(index=1, arguments="{}"),)),
    ]
    whole = plain(message("<markup>", deltas))
    assert (whole["content"], whole["reasoning"]) == ("I call. ", "hmm")
    assert whole["tool_calls"] == [
        {"id": "c-1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "c-2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    chunks = [plain(chat_delta("<markup>", [delta])) for delta in deltas]
    assert chunks[0] == {"reasoning": "hm"} and chunks[1] == {}
    assert chunks[3]["tool_calls"] == [
        {"index": 0, "id": "c-1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    ]
    assert chunks[4]["tool_calls"][0] == {"index": 0, "function": {"arguments": ": 1}"}}


def test_a_message_of_calls_has_no_content() -> None:
    calls = [Delta(tool_calls=(CallDelta(index=0, id="c", name="f", arguments="{}"),))]
    assert plain(message("markup", calls))["content"] is None
    assert plain(message("", [Delta()]))["content"] == ""


def test_markup_that_shows_nothing_makes_no_chunk() -> None:
    assert CHAT.chunk(HEAD, 0, step(Piece(1, (1,), "<tool>", delta=Delta()))) is None
    assert CHAT.chunk(HEAD, 0, step(Piece(1, (1,), ""))) is None
    assert COMPLETION.chunk(HEAD, 0, step(Piece(0, (1,), ""))) is None
    assert CHAT.chunk(HEAD, 0, Step(7)) is None


def test_the_first_and_the_last_chunk_of_a_choice() -> None:
    first, last = CHAT.chunk(HEAD, 1, step(Piece(0, (1,), "Hi"))), CHAT.chunk(HEAD, 1, step(finish_reason="stop"))
    assert first is not None and last is not None
    assert json.loads(first) == {
        "id": "chatcmpl-r-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "org/name",
        "choices": [
            {"index": 1, "delta": {"role": "assistant", "content": "Hi"}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert json.loads(last)["choices"] == [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    empty = CHAT.chunk(HEAD, 0, step(Piece(0, (1,), "")))
    assert empty is not None and json.loads(empty)["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_usage_is_null_until_it_is_told() -> None:
    asked = Head("x", 1, "m", include_usage=True)
    chunk = COMPLETION.chunk(asked, 0, step(Piece(0, (1,), "a")))
    assert chunk is not None and json.loads(chunk)["usage"] is None
    told = json.loads(COMPLETION.usage(asked, Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)))
    assert (told["choices"], told["usage"]["total_tokens"]) == ([], 3)


def test_the_prompt_of_several_choices_counts_once() -> None:
    usages = [Usage(prompt_tokens=5, completion_tokens=count, total_tokens=5 + count) for count in (1, 2, 3)]
    assert total(usages) == Usage(prompt_tokens=5, completion_tokens=6, total_tokens=11)


LOGPROBS = (
    TokenLogprob(token=" a", logprob=-1.0, top=(TopLogprob(" b", -0.5), TopLogprob(" a", -1.0))),
    TokenLogprob(token="\ufffd", logprob=-3.0, top=(TopLogprob("\ufffd", -0.1), TopLogprob("\ufffd", -0.2))),
)


def test_log_probabilities_of_a_chat() -> None:
    assert chat_logprobs(None) is None
    first, second = plain(chat_logprobs(LOGPROBS))["content"]
    assert first["bytes"] == list(b" a") and [top["token"] for top in first["top_logprobs"]] == [" b", " a"]
    assert second["bytes"] is None, "a part of a character: its bytes are not known"


def test_log_probabilities_of_a_completion() -> None:
    found = plain(completion_logprobs(LOGPROBS, 10))
    assert found["tokens"] == [" a", "\ufffd"] and found["token_logprobs"] == [-1.0, -3.0]
    assert found["text_offset"] == [10, 12]
    assert found["top_logprobs"] == [{" b": -0.5, " a": -1.0}, {"\ufffd": -0.1}]
    sampled_only = completion_logprobs((TokenLogprob(token="x", logprob=-2.0),), 0)
    assert plain(sampled_only)["top_logprobs"] == [{"x": -2.0}]


def test_the_document_describes_every_route() -> None:
    served = {
        (path.replace(":str", "").replace(":path", ""), method.lower())
        for handler in HANDLERS
        for path in handler.paths
        for method in handler.http_methods
    }
    described = {(path, verb) for path, verbs in document()["paths"].items() for verb in verbs}
    assert served == described


def test_the_document_refers_to_what_is_there() -> None:
    text = json.dumps(document())
    schemas = document()["components"]["schemas"]
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in schemas
    assert "\\\\A" not in text and "\\\\Z" not in text
    assert schemas["ChatBody"]["required"] == ["model", "messages"]
    assert schemas["ChatBody"]["properties"]["n"] == {"type": "integer", "default": 1, "minimum": 1, "maximum": 8}


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
def test_an_unfinished_answer(shape: Any) -> None:
    found = json.loads(shape.unfinished(HEAD, False))
    assert (found["status"], found["choices"]) == ("queued", [])
