"""Bodies: what is accepted, and every way to be refused, by code, field, value and limit."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pdq.api.body import ChatBody, CompletionBody, parse_body
from pdq.api.chat import Message, TextPart
from pdq.errors import Rejected

unhurried = hypothesis_settings(deadline=None)

HELLO = [{"role": "user", "content": "hello"}]
SECRET = "my-secret-prompt-text"


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOL = tool("weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "hello", **fields}).encode()


def said(*messages: Any) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


def rejection(raw: bytes) -> Rejected:
    with pytest.raises(Rejected) as caught:
        parse_body(raw)
    return caught.value


def test_a_chat_body_with_every_served_field() -> None:
    body = parse_body(
        chat(
            messages=[
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "Jo",
                },
                {"role": "assistant", "content": ""},
            ],
            model="m",
            max_tokens=5,
            max_completion_tokens=5,
            min_tokens=1,
            temperature=0,
            top_p=0.5,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.5,
            top_k=-1,
            min_p=0.25,
            seed=-(2**63),
            stop=["x", "y"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            logit_bias={"7": -100, "8": 0.5},
            logprobs=True,
            top_logprobs=20,
            n=1,
            response_format={"type": "text"},
        )
    )
    assert isinstance(body, ChatBody)
    assert [(m.role, m.text, m.name) for m in body.messages] == [
        ("system", "Be brief.", None),
        ("user", "a\nb", "Jo"),
        ("assistant", "", None),
    ]
    assert body.limit() == ("max_completion_tokens", 5)
    assert body.num_logprobs() == 20
    assert body.stops() == ("x", "y")
    assert body.bias() == {7: -100.0, 8: 0.5}
    assert (body.temperature, body.top_p, body.seed, body.min_tokens) == (0.0, 0.5, -(2**63), 1)
    assert (body.presence_penalty, body.frequency_penalty, body.ignore_eos) == (-2.0, 2.0, True)
    assert (body.repetition_penalty, body.top_k, body.min_p) == (1.5, -1, 0.25)
    assert body.stop_token_ids == [1, 2]


def test_a_completion_body_takes_text_or_token_ids() -> None:
    text = parse_body(completion(logprobs=5, stop="END", max_tokens=3))
    assert isinstance(text, CompletionBody)
    assert (text.prompt, text.num_logprobs(), text.stops(), text.limit()) == ("hello", 5, ("END",), ("max_tokens", 3))
    ids = parse_body(completion(prompt=[0, 5, 49151]))
    assert isinstance(ids, CompletionBody)
    assert ids.prompt == [0, 5, 49151]


def test_absent_fields_have_openai_s_defaults() -> None:
    body = parse_body(chat())
    assert (body.temperature, body.top_p, body.seed, body.limit(), body.stops()) == (
        1,
        1,
        None,
        ("max_tokens", None),
        (),
    )
    assert body.num_logprobs() is None
    assert parse_body(chat(logprobs=True)).num_logprobs() == 0


def test_an_answer_is_held_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    json_schema = {"name": "a", "schema": schema, "strict": True, "description": "An a."}
    body = parse_body(chat(response_format={"type": "json_schema", "json_schema": json_schema}))
    assert json.loads(body.guide()) == schema
    assert json.loads(parse_body(chat(response_format={"type": "json_object"})).guide()) == {"type": "object"}
    assert parse_body(completion(response_format={"type": "text"})).guide() == parse_body(chat()).guide() == ""


def test_a_chat_with_tools() -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        # As OpenAI's client sends back what it was given.
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [CALL],
            "reasoning": "Hm.",
        },
        {"role": "tool", "tool_call_id": "c", "content": "warm"},
    ]
    body = parse_body(chat(messages=turns, tools=[TOOL], parallel_tool_calls=False))
    assert isinstance(body, ChatBody)
    assert [message.turn() for message in body.messages] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "warm", "tool_call_id": "c"},
    ]
    tools = body.tool_use()
    assert tools is not None and json.loads(tools.functions) == [TOOL]
    assert (tools.choice, tools.name, tools.parallel, tools.strict, tools.guided) == ("auto", "", False, False, False)
    assert body.tools[0].shown() == TOOL


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "nonsense", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    body = parse_body(said({"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}))
    assert isinstance(body, ChatBody)
    assert body.messages[1].turn()["tool_calls"][0]["function"]["arguments"] == (arguments or {})


def test_what_an_answer_may_call_and_must() -> None:
    def use(**fields: Any) -> Any:
        body = parse_body(chat(**fields))
        assert isinstance(body, ChatBody)
        return body.tool_use()

    odd = tool("any", parameters={"not": {"type": "string"}})
    named = {"type": "function", "function": {"name": "weather"}}
    assert use() is use(tools=[]) is use(tool_choice="auto") is use(tools=[TOOL], tool_choice="none") is None
    assert use(tools=[TOOL, odd]).guided is False, "what is free to be called may have any schema"
    required, one = use(tools=[TOOL], tool_choice="required"), use(tools=[TOOL], tool_choice=named)
    assert (required.choice, required.guided) == ("required", True)
    assert (one.choice, one.name, one.guided) == ("named", "weather", True)
    assert use(tools=[tool("a", strict=True)]).guided is True


def test_a_message_comes_back_with_what_openai_s_client_added_to_it() -> None:
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    added = call | {"index": 0, "function": call["function"] | {"parsed_arguments": {}}}
    turn: dict[str, Any] = {"role": "assistant", "content": "hello"}
    told = parse_body(said(turn | {"tool_calls": [added], "parsed": {"a": 1}, "refusal": None}))
    assert told == parse_body(said(turn | {"tool_calls": [call]}))
    assert rejection(said({"role": "user", "content": "x", "parsed": None})).param == "messages[0].parsed"


def test_null_counts_as_absent() -> None:
    nulls = dict.fromkeys(("model", "max_tokens", "temperature", "seed", "stop", "logit_bias", "user", "n", "stream"))
    assert parse_body(chat(**nulls)) == parse_body(chat())


def test_client_side_fields_are_accepted_and_change_nothing() -> None:
    body = parse_body(chat(stream=True, stream_options={"include_usage": True}, user="u", metadata={"a": [1, {}]}))
    assert (body.messages, body.temperature) == ([Message(role="user", content="hello")], 1.0)


def test_content_parts_stay_parts_and_join_as_lines() -> None:
    message = Message(role="user", content=[TextPart(type="text", text="a"), TextPart(type="text", text="b")])
    assert message.text == "a\nb"


def test_text_of_all_planes_arrives_unchanged() -> None:
    text = "é 你好 🌍 \u2028 \x00 \ue000"
    body = parse_body(completion(prompt=text))
    assert isinstance(body, CompletionBody)
    assert body.prompt == text


NOT_JSON = {
    "0 bytes": (b"", "0 bytes"),
    "spaces": (b"   ", "3 bytes"),
    "random bytes": (b"\x80\x81\xff\x00", "byte 0 of 4 is 0x80"),
    "invalid UTF-8 in a string": (b'{"prompt":"\xff"}', "byte 11 of 14 is 0xff"),
    "UTF-8 of half a surrogate pair": (b'{"prompt":"\xed\xa0\x80"}', "byte 11"),
    "escape of half a surrogate pair": (b'{"prompt":"\\ud800"}', "not JSON"),
    "UTF-16": ('{"prompt":"a"}'.encode("utf-16"), "0xff"),
    "byte order mark": (b'\xef\xbb\xbf{"prompt":"a"}', "not JSON"),
    "text": (b"hello", "not JSON"),
    "cut off": (b'{"prompt":"hel', "not JSON"),
    "two documents": (b'{"prompt":"a"}{"prompt":"b"}', "not JSON"),
    "NaN": (b'{"prompt":"a","temperature":NaN}', "not JSON"),
    "Infinity": (b'{"prompt":"a","temperature":Infinity}', "not JSON"),
    "1e999": (b'{"prompt":"a","temperature":1e999}', "out of range"),
    "5000 digits": (b'{"prompt":"a","n":' + b"1" * 5000 + b"}", "out of range"),
    "array": (b"[]", "an array of 0 items"),
    "array of bodies": (b'[{"prompt":"a"}]', "an array of 1 items"),
    "string": (json.dumps(SECRET).encode(), "a string of 21 characters"),
    "number": (b"1", "1"),
    "null": (b"null", "null"),
    "10,000 arrays deep": (b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "too deep"),
    "10,000 objects deep": (b'{"metadata":' * 10_000 + b"1" + b"}" * 10_000, "too deep"),
    "10,000 deep and cut off": (b"[" * 10_000, "too deep"),
    "a name twice": (b'{"prompt":"a","model":"x","model":"y"}', "'model' more than once"),
    "a name twice, inside": (b'{"messages":[{"role":"user","content":"a","content":"b"}]}', "'content' more than once"),
}


@pytest.mark.parametrize(("raw", "told"), NOT_JSON.values(), ids=NOT_JSON.keys())
def test_not_a_json_object(raw: bytes, told: str) -> None:
    error = rejection(raw)
    assert error.code == "invalid_json"
    assert told in str(error)


# id: (body, code, param, what the message must name: the value and the limit)
TABLE: dict[str, tuple[bytes, str, str, tuple[str, ...]]] = {
    # what there is to answer
    "neither": (b"{}", "missing_field", "messages", ("messages", "prompt")),
    "messages null": (b'{"messages":null}', "missing_field", "messages", ("messages", "prompt")),
    "both": (chat(prompt="a"), "invalid_value", "prompt", ("messages", "prompt")),
    "empty prompt": (completion(prompt=""), "empty_prompt", "prompt", ("empty", "at least one")),
    "no token ids": (completion(prompt=[]), "empty_prompt", "prompt", ("empty", "at least one")),
    "no messages": (said(), "empty_prompt", "messages", ("0 items", "at least one")),
    "empty message": (said({"role": "user", "content": ""}), "empty_prompt", "messages", ("1 items", "text")),
    "blank messages": (
        said({"role": "system", "content": " \n"}, {"role": "user", "content": []}),
        "empty_prompt",
        "messages",
        ("2 items", "text"),
    ),
    "several prompts": (completion(prompt=[SECRET]), "invalid_type", "prompt[0]", ("21 characters", "int")),
    "token lists": (completion(prompt=[[1]]), "invalid_type", "prompt[0]", ("an array of 1", "int")),
    "float id": (completion(prompt=[1, 2.5]), "invalid_type", "prompt[1]", ("2.5", "int")),
    "bool id": (completion(prompt=[True]), "invalid_type", "prompt[0]", ("true", "int")),
    "prompt object": (completion(prompt={"a": 1}), "invalid_type", "prompt", ("an object of 1", "str | array")),
    # messages
    "messages string": (chat(messages=SECRET), "invalid_type", "messages", ("21 characters", "array")),
    "message string": (said(SECRET), "invalid_type", "messages[0]", ("21 characters", "object")),
    "unknown role": (
        said({"role": "user", "content": "a"}, {"role": "owner", "content": "a"}),
        "unknown_role",
        "messages[1].role",
        ("'owner'", "system, developer, user, assistant, tool"),
    ),
    "function": (said({"role": "function", "content": "a"}), "unknown_role", "messages[0].role", ("'function'",)),
    "tool": (said({"role": "tool", "content": "a"}), "missing_field", "messages[0].tool_call_id", ("'tool'",)),
    "a call's id elsewhere": (
        said({"role": "user", "content": "a", "tool_call_id": "c"}),
        "invalid_value",
        "messages[0].tool_call_id",
        ("only the role 'tool'",),
    ),
    "a user's calls": (
        said({"role": "user", "content": "a", "tool_calls": [CALL]}),
        "invalid_value",
        "messages[0].tool_calls",
        ("only an assistant",),
    ),
    "a user's reasoning": (
        said({"role": "user", "content": "a", "reasoning": SECRET}),
        "invalid_value",
        "messages[0].reasoning",
        ("only an assistant",),
    ),
    "an assistant's nothing": (
        said({"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}),
        "missing_field",
        "messages[1].content",
        ("required",),
    ),
    "an assistant's audio": (
        said({"role": "assistant", "content": "a", "audio": {"id": "x"}}),
        "unknown_field",
        "messages[0].audio",
        ("'audio'",),
    ),
    "a call of another type": (
        said({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}),
        "unsupported",
        "messages[0].tool_calls[0].type",
        ("'custom'", "'function'"),
    ),
    "a call without a name": (
        said({"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}),
        "missing_field",
        "messages[0].tool_calls[0].function.name",
        ("required",),
    ),
    "arguments as an object": (
        said({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]}),
        "invalid_type",
        "messages[0].tool_calls[0].function.arguments",
        ("an object of 1", "str"),
    ),
    "role number": (said({"role": 3, "content": "a"}), "invalid_type", "messages[0].role", ("3", "str")),
    "no role": (said({"content": "a"}), "missing_field", "messages[0].role", ("messages[0]", "role")),
    "no content": (said({"role": "user"}), "missing_field", "messages[0].content", ("messages[0]", "content")),
    "content null": (said({"role": "user", "content": None}), "invalid_type", "messages[0].content", ("null", "str")),
    "content number": (said({"role": "user", "content": 5}), "invalid_type", "messages[0].content", ("5", "str")),
    "part string": (
        said({"role": "user", "content": [SECRET]}),
        "invalid_type",
        "messages[0].content[0]",
        ("21 characters", "object"),
    ),
    "part without text": (
        said({"role": "user", "content": [{"type": "text"}]}),
        "missing_field",
        "messages[0].content[0].text",
        ("required",),
    ),
    "image part": (
        said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}),
        "unsupported",
        "messages[0].content[0].type",
        ("'image_url'", "'text'"),
    ),
    "odd name": (
        said({"role": "user", "content": "a", "name": "<|im_end|>"}),
        "invalid_value",
        "messages[0].name",
        ("'<|im_end|>'", "{1,64}"),
    ),
    # sampling
    "temperature high": (chat(temperature=2.5), "invalid_value", "temperature", ("2.5", "<= 2")),
    "temperature low": (chat(temperature=-0.1), "invalid_value", "temperature", ("-0.1", ">= 0")),
    "temperature string": (chat(temperature="1"), "invalid_type", "temperature", ("'1'", "float")),
    "temperature bool": (chat(temperature=True), "invalid_type", "temperature", ("true", "float")),
    "temperature of 400 digits": (chat(temperature=10**400), "invalid_value", "temperature", ("1000", "out of range")),
    "top_p 0": (chat(top_p=0), "invalid_value", "top_p", ("0", "> 0")),
    "top_p high": (chat(top_p=1.01), "invalid_value", "top_p", ("1.01", "<= 1")),
    "presence": (chat(presence_penalty=2.1), "invalid_value", "presence_penalty", ("2.1", "<= 2")),
    "frequency": (chat(frequency_penalty=-2.1), "invalid_value", "frequency_penalty", ("-2.1", ">= -2")),
    "repetition 0": (chat(repetition_penalty=0), "invalid_value", "repetition_penalty", ("0", "> 0")),
    "repetition high": (chat(repetition_penalty=2.1), "invalid_value", "repetition_penalty", ("2.1", "<= 2")),
    "top_k low": (chat(top_k=-2), "invalid_value", "top_k", ("-2", ">= -1")),
    "top_k float": (chat(top_k=1.5), "invalid_type", "top_k", ("1.5", "int")),
    "min_p high": (chat(min_p=1.1), "invalid_value", "min_p", ("1.1", "<= 1")),
    "seed high": (chat(seed=2**63), "invalid_value", "seed", (str(2**63), f"<= {2**63 - 1}")),
    "seed low": (chat(seed=-(2**63) - 1), "invalid_value", "seed", (str(-(2**63) - 1), f">= {-(2**63)}")),
    "seed float": (chat(seed=1.5), "invalid_type", "seed", ("1.5", "int")),
    "max_tokens string": (chat(max_tokens="5"), "invalid_type", "max_tokens", ("'5'", "int")),
    "max_tokens float": (chat(max_tokens=5.0), "invalid_type", "max_tokens", ("5.0", "int")),
    "two limits": (chat(max_tokens=5, max_completion_tokens=6), "invalid_value", "max_tokens", ("5", "6", "equal")),
    "min_tokens": (chat(min_tokens=-1), "invalid_value", "min_tokens", ("-1", ">= 0")),
    "stop number": (chat(stop=3), "invalid_type", "stop", ("3", "str | array")),
    "stop empty": (chat(stop=""), "invalid_value", "stop", ("''", "length >= 1")),
    "stop list with empty": (chat(stop=["a", ""]), "invalid_value", "stop[1]", ("''", "length >= 1")),
    "five stops": (chat(stop=list("abcde")), "invalid_value", "stop", ("5 items", "length <= 4")),
    "long stop": (chat(stop="x" * 1025), "invalid_value", "stop", ("xxx", "length <= 1024")),
    "stop id string": (chat(stop_token_ids=["a"]), "invalid_type", "stop_token_ids[0]", ("'a'", "int")),
    "65 stop ids": (chat(stop_token_ids=[1] * 65), "invalid_value", "stop_token_ids", ("65 items", "length <= 64")),
    "ignore_eos": (chat(ignore_eos=1), "invalid_type", "ignore_eos", ("1", "bool")),
    "bias array": (chat(logit_bias=[1]), "invalid_type", "logit_bias", ("an array of 1", "object")),
    "bias key": (chat(logit_bias={"a b": 1}), "invalid_value", "logit_bias", ("'a b'", "token id")),
    "bias negative": (chat(logit_bias={"-1": 1}), "invalid_value", "logit_bias", ("'-1'", "token id")),
    "bias with a leading zero": (chat(logit_bias={"07": 1}), "invalid_value", "logit_bias", ("'07'", "token id")),
    "bias other digits": (chat(logit_bias={"١": 1}), "invalid_value", "logit_bias", ("token id",)),
    "bias string": (chat(logit_bias={"7": "x"}), "invalid_type", "logit_bias.7", ("'x'", "-100 to 100")),
    "bias bool": (chat(logit_bias={"7": True}), "invalid_type", "logit_bias.7", ("true", "-100 to 100")),
    "bias high": (chat(logit_bias={"7": 100.5}), "invalid_value", "logit_bias.7", ("100.5", "-100 to 100")),
    "301 biases": (
        chat(logit_bias={str(i): 1 for i in range(301)}),
        "invalid_value",
        "logit_bias",
        ("301 fields", "length <= 300"),
    ),
    "chat logprobs number": (chat(logprobs=5), "invalid_type", "logprobs", ("5", "bool")),
    "top_logprobs 21": (chat(logprobs=True, top_logprobs=21), "invalid_value", "top_logprobs", ("21", "<= 20")),
    "top_logprobs alone": (chat(top_logprobs=3), "invalid_value", "top_logprobs", ("3", "logprobs")),
    "completion logprobs 6": (completion(logprobs=6), "invalid_value", "logprobs", ("6", "<= 5")),
    "completion logprobs bool": (completion(logprobs=True), "invalid_type", "logprobs", ("true", "int")),
    "n": (chat(n=4), "unsupported", "n", ("4", "only 1")),
    "n 0": (chat(n=0), "unsupported", "n", ("0", "only 1")),
    "grammar": (
        chat(response_format={"type": "grammar"}),
        "unsupported",
        "response_format.type",
        ("'grammar'", "'text', 'json_object' and 'json_schema'"),
    ),
    "a schema is missing": (
        chat(response_format={"type": "json_schema"}),
        "missing_field",
        "response_format.json_schema",
        ("needs it",),
    ),
    "a schema for nothing": (
        chat(response_format={"type": "json_object", "json_schema": {"name": "a", "schema": {}}}),
        "invalid_value",
        "response_format.json_schema",
        ("'json_object'",),
    ),
    "no end of an object": (
        completion(response_format={"type": "json_object"}, ignore_eos=True),
        "invalid_value",
        "ignore_eos",
        ("true", "response_format"),
    ),
    "a long call": (
        chat(tools=[TOOL], tool_choice="required", min_tokens=5),
        "invalid_value",
        "min_tokens",
        ("5", "tool_choice"),
    ),
    "no schema in it": (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        "missing_field",
        "response_format.json_schema.schema",
        ("required",),
    ),
    "a schema without a name": (
        completion(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
        "missing_field",
        "response_format.json_schema.name",
        ("required",),
    ),
    "an odd schema": (
        completion(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"items": {"type": "x"}}}}
        ),
        "invalid_value",
        "response_format.json_schema.schema.items.type",
        ("'x'", "array, boolean"),
    ),
    "model number": (chat(model=7), "invalid_type", "model", ("7", "str")),
    "stream string": (chat(stream="yes"), "invalid_type", "stream", ("'yes'", "bool")),
    "user number": (chat(user=7), "invalid_type", "user", ("7", "str")),
    # fields that are not served, by name
    "tools of a prompt": (completion(tools=[TOOL]), "unsupported", "tools", ("tools", "not served")),
    "modalities": (chat(modalities=["audio"]), "unsupported", "modalities", ("modalities", "not served")),
    # tools
    "tools object": (chat(tools={}), "invalid_type", "tools", ("an object of 0", "array")),
    "129 tools": (chat(tools=[TOOL] * 129), "invalid_value", "tools", ("129 items", "<= 128")),
    "a built-in tool": (
        chat(tools=[{"type": "web_search"}]),
        "unsupported",
        "tools[0].type",
        ("'web_search'", "only 'function'"),
    ),
    "a tool without a name": (
        chat(tools=[{"type": "function", "function": {}}]),
        "missing_field",
        "tools[0].function.name",
        ("required",),
    ),
    "a tool's odd name": (chat(tools=[tool("a.b")]), "invalid_value", "tools[0].function.name", ("'a.b'", "{1,64}")),
    "two of a name": (chat(tools=[TOOL, TOOL]), "invalid_value", "tools[1].function.name", ("'weather'", "earlier")),
    "a tool's description": (
        chat(tools=[tool("a", description=[SECRET])]),
        "invalid_type",
        "tools[0].function.description",
        ("1 items", "str"),
    ),
    "large tools": (
        chat(tools=[tool("a", description="x" * 131_072)]),
        "invalid_value",
        "tools",
        ("bytes", "131072"),
    ),
    "a choice of none": (chat(tool_choice="required"), "invalid_value", "tool_choice", ("no tools",)),
    "a name of none": (
        chat(tool_choice={"type": "function", "function": {"name": "a"}}),
        "invalid_value",
        "tool_choice",
        ("no tools",),
    ),
    "another choice": (
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "rain"}}),
        "invalid_value",
        "tool_choice.function.name",
        ("'rain'", "none of the tools"),
    ),
    "an odd choice": (chat(tools=[TOOL], tool_choice="any"), "unsupported", "tool_choice", ("'any'", "'required'")),
    "allowed tools": (
        chat(tools=[TOOL], tool_choice={"type": "allowed_tools", "allowed_tools": {}}),
        "unsupported",
        "tool_choice.type",
        ("'allowed_tools'", "'function'"),
    ),
    "parallel": (chat(tools=[TOOL], parallel_tool_calls="no"), "invalid_type", "parallel_tool_calls", ("'no'", "bool")),
    "a schema that a forced call cannot keep": (
        chat(tools=[tool("a", parameters={"not": {}})], tool_choice="required"),
        "unsupported",
        "tools[0].function.parameters.not",
        ("no grammar",),
    ),
    "a schema that a strict call cannot keep": (
        chat(tools=[TOOL, tool("a", parameters={"properties": {"x": {"type": "date"}}}, strict=True)]),
        "invalid_value",
        "tools[1].function.parameters.properties.x.type",
        ("'date'",),
    ),
    "functions": (chat(functions=[]), "unsupported", "functions", ("functions", "not served")),
    "echo": (completion(echo=True), "unsupported", "echo", ("echo", "not served")),
    "best_of": (completion(best_of=2), "unsupported", "best_of", ("best_of", "not served")),
    "typing error": (chat(temprature=1), "unknown_field", "temprature", ("'temprature'",)),
    "unknown null": (chat(temprature=None), "unknown_field", "temprature", ("'temprature'",)),
    "chat field in completions": (completion(top_logprobs=1), "unknown_field", "top_logprobs", ("'top_logprobs'",)),
    "long name": (chat(**{"x" * 5000: 1}), "unknown_field", "x" * 40, ("x" * 40 + "'…",)),
    "odd field": (chat(**{"a\nb` - at `$.model": 1}), "unknown_field", r"a\nb` - at `$.model", (r"a\nb",)),
}


@pytest.mark.parametrize(("raw", "code", "param", "named"), TABLE.values(), ids=TABLE.keys())
def test_bad_input(raw: bytes, code: str, param: str, named: tuple[str, ...]) -> None:
    error = rejection(raw)
    message = str(error)
    assert (error.code, error.param) == (code, param), message
    for part in named:
        assert part in message
    assert message.isprintable() and len(message) < 250
    assert SECRET not in message


INTERNAL = (
    "kv_transfer_params",
    "extra_args",
    "cache_salt",
    "vllm_xargs",
    "lmcache.skip_save",
    "prompt_logprobs",
    "request_id",
    "priority",
    "attempt",
    "deadline",
)


@pytest.mark.parametrize("name", INTERNAL)
def test_internal_fields_are_refused_by_name(name: str) -> None:
    for raw in (chat(**{name: {"remote_host": "10.0.0.1"}}), completion(**{name: 1})):
        error = rejection(raw)
        assert (error.code, error.param) == ("unknown_field", name)
        assert repr(name) in str(error)


@pytest.mark.parametrize("place", ["prompt", "content", "user", "metadata", "role"])
def test_at_most_forty_characters_of_a_value_are_shown_and_none_of_a_prompt(place: str) -> None:
    long = SECRET + "z" * 5000
    bad: dict[str, Any] = {
        "prompt": {"prompt": [long]},
        "content": {"messages": [{"role": "user", "content": [{"type": "text", "text": [long]}]}]},
        "user": {"messages": HELLO, "user": [long]},
        "metadata": {"messages": HELLO, "metadata": long},
        "role": {"messages": [{"role": "z" * 5000, "content": long}]},
    }
    error = rejection(json.dumps(bad[place]).encode())
    assert SECRET not in str(error)
    assert "z" * 41 not in str(error)
    assert error.__cause__ is None  # msgspec's own message holds the value in full


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "tools", "x"}))
likely = st.one_of(
    json_values,
    st.sampled_from([HELLO, "hello", [1, 2], 1, 0.5, True, {"7": 1}, {"type": "text"}]),
    st.lists(
        st.dictionaries(st.sampled_from(["role", "content", "name", "text", "tool_calls"]), json_values, max_size=4),
        max_size=3,
    ),
)


@unhurried
@given(st.dictionaries(fields, likely, max_size=6) | json_values)
def test_any_json_is_a_body_or_rejected(document: Any) -> None:
    check(json.dumps(document).encode("utf-8", "surrogatepass"))


@unhurried
@given(st.binary(max_size=64))
def test_any_bytes_are_a_body_or_rejected(raw: bytes) -> None:
    check(raw)


@unhurried
@given(st.text(st.characters(), max_size=64))
def test_any_escaped_text_is_a_prompt_or_rejected(text: str) -> None:
    body = check(json.dumps({"prompt": text}).encode())
    if body is not None:
        assert isinstance(body, CompletionBody)
        assert body.prompt == text
        text.encode()


def check(raw: bytes) -> ChatBody | CompletionBody | None:
    try:
        return parse_body(raw)
    except Rejected as error:
        assert str(error).isprintable() and len(str(error)) < 400
        return None
