"""Schemas as the grammar library (xgrammar) must be given them, so that what it lets through is JSON."""

from __future__ import annotations

import json
from typing import Any

from pdq.api.schema import SUBSCHEMA, SUBSCHEMAS_BY_NAME, SUBSCHEMAS_IN_ORDER

CHARACTER = r'[^"\\\x00-\x1f]'
"""One of a string, as JSON writes it: none that it would write with a backslash."""
MOST_REPEATS = 128
"""Of a character in a pattern, within an object: with more, the library fails."""


def enforceable(schema: str) -> str:
    """A schema's text with the same meaning, but for strings of a given length: those hold no character that JSON
    escapes. (The library forgets control characters in its own rule for lengths, and lets a bare tab through.)"""
    return json.dumps(_enforceable(json.loads(schema)), ensure_ascii=False)


def enforceable_tools(functions: str) -> list[dict[str, Any]]:
    """OpenAI's `tools`, with parameters like that."""
    tools: list[dict[str, Any]] = json.loads(functions)
    for tool in tools:
        if "parameters" in tool["function"]:
            tool["function"]["parameters"] = _enforceable(tool["function"]["parameters"])
    return tools


def _enforceable(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = {name: _enforceable(value) if name in SUBSCHEMA else value for name, value in schema.items()}
    for name in SUBSCHEMAS_IN_ORDER & made.keys():
        if isinstance(made[name], list):
            made[name] = [_enforceable(each) for each in made[name]]
    for name in SUBSCHEMAS_BY_NAME & made.keys():
        if isinstance(made[name], dict):
            made[name] = {key: _enforceable(each) for key, each in made[name].items()}
    return _with_pattern(made)


def _with_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    if not {"minLength", "maxLength"} & schema.keys() or {"pattern", "format"} & schema.keys():
        return schema
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    others = {name: value for name, value in schema.items() if name not in ("minLength", "maxLength")}
    rest = f"{CHARACTER}*" if most is None else _at_most(most - least)
    return others | {"pattern": f"^{_exactly(least)}{rest}$"}


def _exactly(number: int) -> str:
    blocks, rest = divmod(number, MOST_REPEATS)
    return f"{_BLOCK}{{{blocks}}}" * (blocks > 0) + f"{CHARACTER}{{{rest}}}" * (rest > 0)


def _at_most(number: int) -> str:
    """Whole blocks, then a part of one; or all blocks, and what is left."""
    blocks, rest = divmod(number, MOST_REPEATS)
    if blocks == 0:
        return f"{CHARACTER}{{0,{rest}}}"
    last = f"{CHARACTER}{{0,{MOST_REPEATS}}}"
    return f"(?:{_BLOCK}{{0,{blocks - 1}}}{last}|{_BLOCK}{{{blocks}}}{CHARACTER}{{0,{rest}}})"


_BLOCK = f"(?:{CHARACTER}{{{MOST_REPEATS}}})"
