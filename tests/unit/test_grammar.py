"""What a grammar made of a schema lets through is JSON that satisfies it: the library alone, without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pdq.api.schema import check_schema
from pdq.engines.grammar import CHARACTER, enforceable, enforceable_tools

pytestmark = pytest.mark.filterwarnings("default")

END = 256


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Of a vocabulary of bytes."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo([bytes((byte,)) for byte in range(256)] + [b"<end>"], stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def lets_through(compiler: Any, schema: dict[str, Any], text: str) -> bool:
    import xgrammar

    guide = enforceable(check_schema(schema, "s"))
    grammar = compiler.compile_json_schema(guide, any_whitespace=False, separators=(",", ":"))
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(byte) for byte in text.encode()) and bool(matcher.accept_token(END))


STRINGS: dict[str, dict[str, Any]] = {
    "free": {"type": "string"},
    "short": {"type": "string", "maxLength": 5},
    "long": {"type": "string", "minLength": 2},
    "both": {"type": "string", "minLength": 1, "maxLength": 20},
    "or null": {"type": ["string", "null"], "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^.{1,5}$"},
    "no space": {"type": "string", "pattern": r"^\S+$"},
    "not a": {"type": "string", "pattern": "^[^a]+$"},
}
NO_JSON = ['"a"b"', '"a\tb"', '"a\x00b"', '"a\nb"', '"a\\xb"', '"ab', "ab"]


@pytest.mark.parametrize("schema", STRINGS.values(), ids=STRINGS.keys())
@pytest.mark.parametrize("text", NO_JSON)
def test_what_is_no_json_is_not_let_through(compiler: Any, schema: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError):
        json.loads(text)
    assert not lets_through(compiler, schema, text)
    assert not lets_through(compiler, {"type": "array", "items": schema}, f"[{text}]")


def test_lengths_are_kept(compiler: Any) -> None:
    both = {"type": "string", "minLength": 2, "maxLength": 4}
    fits = {text: lets_through(compiler, both, f'"{text}"') for text in ("a", "ab", "éü你🌍", "abcde", "")}
    assert fits == {"a": False, "ab": True, "éü你🌍": True, "abcde": False, "": False}
    assert lets_through(compiler, {"type": "string", "minLength": 3}, f'"{"x" * 500}"')
    for least, most in ((0, 128), (0, 200), (129, 256), (3, 1000), (300, None)):
        bounds = {"minLength": least} | ({"maxLength": most} if most else {})
        place = {"type": "object", "properties": {"a": {"type": "string", **bounds}}, "required": ["a"]}
        for length in {0, least - 1, least, least + 128, (most or 900) - 1, most or 900, (most or 900) + 1} - {-1}:
            fits = least <= length <= (most or 10_000)
            assert lets_through(compiler, place, f'{{"a":"{"x" * length}"}}') == fits, (least, most, length)
    assert lets_through(compiler, {"type": ["string", "null"], "maxLength": 2}, "null")


def test_only_schemas_are_rewritten() -> None:
    schema = {
        "properties": {
            "maxLength": {"maxLength": 3, "title": "t"},
            "kept": {"enum": [{"maxLength": 3}], "default": {"minLength": 1}, "pattern": "a", "maxLength": 3},
        },
        "items": {"anyOf": [{"minLength": 1}, True]},
        "$defs": {"a": {"additionalProperties": {"minLength": 1, "maxLength": 2}}},
    }
    assert json.loads(enforceable(json.dumps(schema))) == {
        "properties": {
            "maxLength": {"title": "t", "pattern": f"^{CHARACTER}{{0,3}}$"},
            "kept": schema["properties"]["kept"],
        },
        "items": {"anyOf": [{"pattern": f"^{CHARACTER}{{1}}{CHARACTER}*$"}, True]},
        "$defs": {"a": {"additionalProperties": {"pattern": f"^{CHARACTER}{{1}}{CHARACTER}{{0,1}}$"}}},
    }
    (tool,) = enforceable_tools(json.dumps([{"type": "function", "function": {"name": "f", "parameters": schema}}]))
    assert tool["function"]["parameters"] == json.loads(enforceable(json.dumps(schema)))
    assert enforceable_tools('[{"function":{"name":"f"}}]') == [{"function": {"name": "f"}}]
