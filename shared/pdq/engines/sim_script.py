"""What the sim says first where a real model would be held to a grammar, call tools, or think.

Held to a schema it gives that schema's smallest instance; forced to call, it calls; free to, it calls the functions
that the prompt names with an `@`. A model that reasons thinks the same thought before every chat's answer.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from pdq.messages import Sampling, Tools

THOUGHT = "<think>Let me see: 你好.</think>"
WORD = "sim ü"
DEEPEST_INSTANCE = 40
"""A schema that demands itself has no end: it is cut off there, and what is left is null."""


class Script(NamedTuple):
    """UTF-8 text, a token a byte. `alone`: the answer ends after it."""

    text: bytes = b""
    alone: bool = False


def script_of(sampling: Sampling, prompt: str, *, reasons: bool) -> Script:
    """The script of an answer to `prompt`. `reasons`: the model does."""
    thought = THOUGHT if reasons and sampling.parsed else ""
    calls = _calls(sampling.tools, prompt) if sampling.tools is not None else ""
    said = calls or (json.dumps(instance(json.loads(sampling.guide)), ensure_ascii=False) if sampling.guide else "")
    return Script((thought + said).encode(), alone=bool(said))


def _calls(tools: Tools, prompt: str) -> str:
    functions = [tool["function"] for tool in json.loads(tools.functions)]
    if tools.choice == "auto":
        chosen = [function for function in functions if f"@{function['name']}" in prompt]
    else:
        chosen = [function for function in functions if tools.name in ("", function["name"])][:1]
    calls = [
        {"name": function["name"], "arguments": instance(function.get("parameters") or {"type": "object"})}
        for function in chosen[: None if tools.parallel else 1]
    ]
    return "\n".join(f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>" for call in calls)


def instance(schema: Any, root: Any = None, depth: int = 0) -> Any:
    """A value that satisfies a schema: all properties, the least of everything else. Patterns are ignored."""
    root = schema if root is None else root
    if not isinstance(schema, dict) or depth > DEEPEST_INSTANCE:
        return None
    if "$ref" in schema:
        return instance(_found(schema["$ref"], root), root, depth + 1)
    for name in ("const", "enum", "anyOf", "oneOf", "allOf"):
        if name in schema:
            return _chosen(name, schema[name], root, depth)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            return {name: instance(each, root, depth + 1) for name, each in schema.get("properties", {}).items()}
        case "array":
            items = schema.get("prefixItems") or [schema.get("items", {})] * schema.get("minItems", 1)
            return [instance(each, root, depth + 1) for each in items]
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return True
        case "null":
            return None
    return WORD[: schema.get("maxLength")].ljust(schema.get("minLength", 0), ".")


def _chosen(name: str, value: Any, root: Any, depth: int) -> Any:
    if name == "const":
        return value
    return value[0] if name == "enum" else instance(value[0], root, depth + 1)


def _found(place: str, root: Any) -> Any:
    for part in place.split("/")[1:]:
        root = root[part.replace("~1", "/").replace("~0", "~")]
    return root
