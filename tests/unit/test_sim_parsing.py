"""The sim's grammars, calls and thoughts: real enough to test all that is around an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.api.schema import check_schema
from pdq.bytes_tokenizer import BytesTokenizer
from pdq.engines.base import Work
from pdq.engines.sim_model import answer
from pdq.engines.sim_parser import SimReading
from pdq.engines.sim_script import THOUGHT, instance
from pdq.log.parsed import Parsed
from pdq.messages import Sampling, Tools

from tests.unit.test_schema import SERVED

TOKENIZER = BytesTokenizer(2048)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = json.dumps(
    [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "news")]
)


def sampling(max_tokens: int = 400, **fields: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, **fields)


def read(asked: Sampling, text: str, cuts: list[int] | None = None, shown: int = 0) -> tuple[Parsed, SimReading]:
    """The text in pieces that end at `cuts`; the first `shown` characters came earlier."""
    reading = SimReading(Work(request="t.r.d1", prompt=(1,), sampling=asked, salt=""))
    reading.resume(text[:shown])
    parsed = Parsed()
    ends = sorted({cut for cut in cuts or [] if shown < cut < len(text)} | {len(text)})
    for begin, end in zip([shown, *ends[:-1]], ends, strict=True):
        parsed.add(reading.take(text[begin:end], final=end == len(text)))
    return parsed, reading


def said(asked: Sampling, prompt: str = "hi", *, reasons: bool = False) -> tuple[str, str]:
    whole = answer(TOKENIZER, TOKENIZER.encode(prompt), asked, 100_000, reasons=reasons)
    return whole.text, whole.finish_reason


@pytest.mark.parametrize("schema", SERVED.values(), ids=SERVED.keys())
def test_a_schema_has_an_instance(schema: dict[str, Any]) -> None:
    text, reason = said(sampling(50_000, guide=check_schema(schema, "s")))
    assert (json.loads(text), reason) == (instance(schema), "stop")


def test_an_instance_satisfies_its_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string", "minLength": 9},
            "short": {"type": "string", "maxLength": 2},
            "n": {"type": ["integer", "null"], "minimum": 7},
            "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            "pick": {"enum": ["a", "b"]},
            "one": {"anyOf": [{"const": 3}, {}]},
        },
    }
    made = {"s": "sim ü....", "short": "si", "n": 7, "list": [True, True], "pick": "a", "one": 3}
    assert instance(schema) == made


def test_calls_are_made_where_they_must_be_and_where_they_are_asked_for() -> None:
    for tools, prompt, names in (
        (Tools(functions=FUNCTIONS, choice="required"), "hi", ["weather"]),
        (Tools(functions=FUNCTIONS, choice="named", name="news"), "hi", ["news"]),
        (Tools(functions=FUNCTIONS), "@news and @weather", ["weather", "news"]),
        (Tools(functions=FUNCTIONS, parallel=False), "@news and @weather", ["weather"]),
        (Tools(functions=FUNCTIONS), "weather", []),
    ):
        asked = sampling(tools=tools, parsed=True)
        text, _ = said(asked, prompt)
        parsed, reading = read(asked, text)
        assert [call.name for call in parsed.calls] == names
        assert all(json.loads(call.arguments) == {"city": "sim ü", "days": 1} for call in parsed.calls)
        assert reading.reason("stop") == ("tool_calls" if names else "stop")
        assert ("<tool_call>" in text) == bool(names) and "<tool_call>" not in parsed.content


def test_a_model_that_reasons_thinks_first() -> None:
    text, _ = said(sampling(80, parsed=True), reasons=True)
    parsed, _ = read(sampling(parsed=True), text)
    assert text.startswith(THOUGHT)
    assert f"<think>{parsed.reasoning}</think>{parsed.content}" == text
    assert not said(sampling(80), reasons=True)[0].startswith("<think>"), "plain completions do not reason"


@given(st.lists(st.integers(1, 300)), st.integers(0, 300), st.integers(1, 400))
def test_what_is_parsed_follows_from_the_text_alone(cuts: list[int], shown: int, tokens: int) -> None:
    asked = sampling(tokens, tools=Tools(functions=FUNCTIONS), parsed=True)
    text, reason = said(asked, "@news and @weather", reasons=True)
    whole, by_whole = read(asked, text)
    parsed, reading = read(asked, text, cuts, min(shown, len(text) - 1) if text else 0)
    assert (parsed.content, parsed.reasoning, parsed.calls) == (whole.content, whole.reasoning, whole.calls)
    assert reading.reason("stop") == by_whole.reason("stop")
    if reason == "length":
        assert reading.reason("length") == "length"
