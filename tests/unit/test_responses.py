"""Requests for responses: what becomes of them as chats, and of a chat's errors."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.api.body import ChatBody, parse_body
from pdq.api.responses_body import ResponsesBody, parse_responses_body
from pdq.api.responses_chat import renamed, translate
from pdq.errors import PdqError, Rejected
from pdq.messages import ErrorInfo
from pdq.settings import Models, ModelSpec
from pdq_gateway.ask import IDEMPOTENCY_HEADER
from pdq_gateway.errors import Failed
from pdq_gateway.responses_ask import read_again, read_response_ask

MODELS = Models({"m": ModelSpec(slug="m", id="org/m", max_model_len=100, vocab_size=300)})


def chat_of(**fields: Any) -> dict[str, Any]:
    """The chat of a request; the chat's own checks find nothing wrong with it."""
    made = translate(parse_responses_body(json.dumps({"model": "m", **fields}).encode()))
    assert isinstance(parse_body(made.body), ChatBody)
    found: dict[str, Any] = json.loads(made.body)
    assert len(made.places) == len(found["messages"])
    return found


def test_a_text_is_a_turn_of_the_user_under_the_instructions() -> None:
    assert chat_of(input="hello", instructions="Be brief.") == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        "temperature": 1.0,
        "top_p": 1.0,
        "stream": False,
    }


def test_every_field_has_its_place_in_the_chat() -> None:
    tool = {"type": "function", "name": "f", "description": "It.", "parameters": {"type": "object"}, "strict": True}
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True, "description": "b"}
    chat = chat_of(
        input="hello",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        stream=True,
        text={"format": schema, "verbosity": "medium"},
        tools=[tool],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    del chat["messages"]
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict")}
    assert chat == {
        "model": "m",
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "stream": True,
        "response_format": {
            "type": "json_schema",
            "json_schema": {name: schema[name] for name in ("name", "schema", "description", "strict")},
        },
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 3,
    }


def test_what_changes_no_answer_is_not_in_the_chat() -> None:
    about = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}, "store": False}
    nothing = {"reasoning": {"effort": None}, "stream_options": {"include_obfuscation": False}, "conversation": None}
    assert chat_of(input="hello", **about, **nothing, service_tier="auto", background=False) == chat_of(input="hello")


def call(number: int, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}", **more}


def result(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": f"r{number}"}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}], **more}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


USER = {"role": "user", "content": "hello"}


def made_call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def text(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


TURNS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([USER, said("hi"), USER], [USER, {"role": "assistant", "content": text("hi")}, USER]),
    (
        [USER, call(1, id="fc", status="completed"), call(2), result(1), result(2)],
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [made_call(1), made_call(2)]},
            {"role": "tool", "tool_call_id": "c1", "content": "r1"},
            {"role": "tool", "tool_call_id": "c2", "content": "r2"},
        ],
    ),
    (
        [USER, thought("hm"), said("hi", type="message", id="m", status="completed"), call(1), result(1), said("so")],
        [
            USER,
            {"role": "assistant", "content": text("hi"), "reasoning": "hm", "tool_calls": [made_call(1)]},
            {"role": "tool", "tool_call_id": "c1", "content": "r1"},
            {"role": "assistant", "content": text("so")},
        ],
    ),
    # Messages of their own are turns of their own.
    (
        [USER, said("a"), said("b"), call(1), said("c"), thought("d"), thought("e"), result(1)],
        [
            USER,
            {"role": "assistant", "content": text("a")},
            {"role": "assistant", "content": text("b"), "tool_calls": [made_call(1)]},
            {"role": "assistant", "content": text("c")},
            {"role": "assistant", "content": "", "reasoning": "d"},
            {"role": "assistant", "content": "", "reasoning": "e"},
            {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        ],
    ),
    (
        [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "input_text", "text": "x"}] * 2}],
        [{"role": "developer", "content": "d"}, {"role": "user", "content": text("x") * 2}],
    ),
]


@pytest.mark.parametrize(("items", "messages"), TURNS)
def test_items_are_turns(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    assert chat_of(input=items)["messages"] == messages


def test_fields_that_are_null_are_absent() -> None:
    """As OpenAI's clients send back what they were given."""
    back = [
        said("hi", phase=None)
        | {"content": [{"type": "output_text", "text": "hi", "annotations": [], "logprobs": None}]},
        call(1, namespace=None, caller=None),
        {**thought("x"), "encrypted_content": None},
    ]
    tool = {"type": "function", "name": "f", "parameters": None, "strict": None, "defer_loading": None}
    nulls = {"max_output_tokens": None, "tools": [tool], "text": {"format": None}, "previous_response_id": None}
    chat = chat_of(input=[USER, *back], **nulls)
    assert chat["messages"][1] == {"role": "assistant", "content": text("hi"), "tool_calls": [made_call(1)]}


def test_the_chats_errors_are_told_in_the_requests_words() -> None:
    places = ("instructions", "input[0]", "input[3]")
    cases = [
        ("messages", "messages has 9 tokens", "input", "input has 9 tokens"),
        ("messages[2].content", "messages[2].content is bad", "input[3]", "input[3] is bad"),
        ("max_completion_tokens", "max_completion_tokens is 9", "max_output_tokens", "max_output_tokens is 9"),
        (
            "response_format.json_schema.schema.type",
            "response_format.json_schema.schema.type is bad",
            "text.format.schema.type",
            "text.format.schema.type is bad",
        ),
        ("tools[1].function.name", "tools[1].function.name is 'f'", "tools[1].name", "tools[1].name is 'f'"),
        ("temperature", "temperature is 9", "temperature", "temperature is 9"),
        (None, "it failed", None, "it failed"),
    ]
    for param, message, own_param, own_message in cases:
        found = renamed(ErrorInfo(code="x", message=message, param=param), places)
        assert (found.param, found.message) == (own_param, own_message)
    assert renamed(ErrorInfo(code="x", message="m", param="messages[7].role")).param == "input"


def test_an_ask_is_the_chats() -> None:
    raw = json.dumps({"model": "org/m", "input": "hello", "background": True, "metadata": {"a": "b"}}).encode()
    wanted = read_response_ask(raw, {IDEMPOTENCY_HEADER: "k", "Pdq-Priority": "low"}, MODELS)
    assert wanted.at_once and wanted.ask.background and wanted.ask.named and wanted.store
    assert wanted.ask.headers == {"Pdq-Priority": "low"} and wanted.ask.model == "m"
    assert json.loads(wanted.ask.bodies[0])["messages"] == [USER]
    assert wanted.asked["metadata"] == {"a": "b"} and wanted.asked["background"] is True
    streamed = json.dumps({"model": "m", "input": "hello", "background": True, "stream": True}).encode()
    assert not read_response_ask(streamed, {}, MODELS).at_once


def test_what_the_chats_checks_find_is_a_place_of_the_input() -> None:
    raw = json.dumps({"model": "m", "input": [{"role": "user", "content": "  "}]}).encode()
    with pytest.raises(Failed) as refused:
        read_response_ask(raw, {}, MODELS)
    assert (refused.value.code, refused.value.info.param) == ("empty_prompt", "input")


@pytest.mark.parametrize(("after", "header", "place"), [(3, None, 3), (None, "4", 4), (3, "4", 4), (None, None, None)])
def test_the_place_to_go_on_after(after: int | None, header: str | None, place: int | None) -> None:
    """A reader that reconnects by itself repeats its question, and tells in the header what it has by now."""
    headers = {"Last-Event-ID": header} if header is not None else {}
    found = read_again("resp_r-1", headers, starting_after=after, stream=True).ask
    assert found.name.request == "r-1"
    assert (found.after.seqs[0] if found.after is not None else None) == place


@pytest.mark.parametrize("id", ["r-1", "resp_", "resp_a.b", "resp_*", "chatcmpl-r-1", "resp_" + "x" * 65])
def test_what_is_no_id_of_a_response(id: str) -> None:
    with pytest.raises(Failed) as refused:
        read_again(id, {})
    assert refused.value.code == "not_found"


@pytest.mark.parametrize("place", ["1.2", "1.end", "x", "-1"])
def test_what_is_no_place_in_a_response(place: str) -> None:
    with pytest.raises(Rejected):
        read_again("resp_r-1", {"Last-Event-ID": place}, stream=True)


NAMES = st.sampled_from(
    "type role content text name id status format schema call_id arguments output summary parameters effort".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(ResponsesBody.__struct_fields__), JSON, max_size=4), JSON)
def test_whatever_is_sent_it_is_served_or_refused(fields: dict[str, Any], item: Any) -> None:
    for body in (fields, {"model": "m", "input": [item], **fields}, {"model": "m", "input": "hello", **fields}):
        with contextlib.suppress(PdqError):
            wanted = read_response_ask(json.dumps(body).encode(), {}, MODELS)
            assert isinstance(parse_body(wanted.ask.bodies[0]), ChatBody)


@pytest.mark.parametrize("depth", [100, 480, 900])
@pytest.mark.parametrize("place", ["input", "text", "tools", "metadata", "reasoning", "tool_choice"])
def test_what_is_nested_deeply_is_served_or_refused(place: str, depth: int) -> None:
    nested: Any = "x"
    for _ in range(depth):
        nested = [nested] if depth % 3 else {"properties": nested}
    values: dict[str, Any] = {
        "input": [{"role": "user", "content": nested}],
        "text": {
            "format": {"type": "json_schema", "name": "a", "schema": {"const": nested, "properties": {"a": nested}}}
        },
        "tools": [{"type": "function", "name": "f", "parameters": nested}],
    }
    with contextlib.suppress(PdqError):
        read_response_ask(
            json.dumps({"model": "m", "input": "x", place: values.get(place, nested)}).encode(), {}, MODELS
        )
