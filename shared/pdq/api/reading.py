"""Reading a body of JSON: strictly, and with refusals that name the field and never quote a prompt."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from pdq.api.refusals import Code, field_name, hidden, refuse, shown
from pdq.errors import Rejected


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises Rejected."""
    document = _decode(raw)
    if not isinstance(document, dict):
        raise refuse("invalid_json", None, f"body is {hidden(document)}; expected a JSON object")
    return document


def _decode(raw: bytes) -> Any:
    try:
        raw.decode("utf-8")
        document = msgspec.json.decode(raw)
        json.loads(raw, object_pairs_hook=_once)
    except UnicodeDecodeError as exc:
        message = f"body is not UTF-8: byte {exc.start} of {len(raw)} is 0x{raw[exc.start]:02x}"
        raise refuse("invalid_json", None, message) from None
    except RecursionError:
        raise refuse("invalid_json", None, "body is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as exc:
        raise refuse("invalid_json", None, f"body of {len(raw)} bytes is not JSON: {exc}") from None
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may take different ones of two equal names, so a body has each name once."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise refuse("invalid_json", field_name(name), f"body has the field {shown(name)} more than once")
        fields[name] = value
    return fields


def unknown_field(parent: str, name: str) -> Rejected:
    """The refusal of a field. `parent`: where it is; empty: in the body itself."""
    where = f"a field of {parent}" if parent else "a field of a request"
    param = f"{parent}.{field_name(name)}" if parent else field_name(name)
    return refuse("unknown_field", param, f"{shown(name)} is not {where}")


_AT = re.compile(r"(?s)(.*) - at `\$([^`]*)`\Z")
_NAMED = re.compile(r"(?s)Object (contains unknown|missing required) field `(.*)`")
_PRIVATE = re.compile(r"(messages|prompt|input|instructions|tools|user|metadata)\b(?!.*\.(role|name|type)\Z)")


def explained(fields: dict[str, Any], text: str) -> Rejected:
    """msgspec's verdict (`Expected ..., got ... - at $.path`) as ours, with the value at that path."""
    found = _AT.match(text)
    verdict, path = (found[1], found[2]) if found else (text, "")
    param = path.removeprefix(".").replace("[...]", "")
    if named := _NAMED.match(verdict):
        return unknown_field(param, named[2]) if "unknown" in named[1] else _missing(param, named[2])
    value = _value_at(fields, path)
    described = f"{param} is {hidden(value) if _PRIVATE.match(param) else shown(value)}"
    if verdict.startswith(("Invalid enum value", "Invalid value")):
        return _refused_choice(param, described)
    if not verdict.startswith("Expected "):
        return refuse("invalid_value", param, f"{described}: {verdict}")
    expected, _, got = verdict.removeprefix("Expected ").replace("`", "").partition(", got ")
    code: Code = "invalid_type" if got else "invalid_value"
    return refuse(code, param, f"{described}; expected {expected.replace(' | null', '')}")


def _missing(parent: str, name: str) -> Rejected:
    param = f"{parent}.{name}" if parent else name
    return refuse("missing_field", param, f"{parent or 'body'} has no {name}; it is required")


def _refused_choice(param: str, described: str) -> Rejected:
    if param.endswith(".role"):
        return refuse("unknown_role", param, f"{described}; expected one of system, developer, user, assistant, tool")
    served = next((text for place, text in _SERVED if place.match(param)), "'text' is")
    return refuse("unsupported", param, f"{described}; only {served} served")


_SERVED = (
    (re.compile(r"(response_format|text\.format)\."), "'text', 'json_object' and 'json_schema' are"),
    (re.compile(r"tool_choice\Z"), "'none', 'auto', 'required' and a function are"),
    (re.compile(r"tools\b|tool_choice\b|.*\.tool_calls\b"), "'function' is"),
    (re.compile(r"input\[\d+\]\.type\Z"), "'message', 'function_call', 'function_call_output' and 'reasoning' are"),
    (re.compile(r"input\[\d+\]\.(content|output)\b"), "'input_text' and 'output_text' are"),
    (re.compile(r"text\.verbosity\Z"), "'medium' is"),
    (re.compile(r"truncation\Z"), "'disabled' is"),
    (re.compile(r"service_tier\Z"), "'auto' and 'default' are"),
    (re.compile(r"include\b"), "'message.output_text.logprobs' is"),
)


def _value_at(value: Any, path: str) -> Any:
    """The value at msgspec's path; the nearest one above it where the path does not tell (`[...]`)."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            value = value[name or int(index)]
        except (LookupError, TypeError):
            return value
    return value
