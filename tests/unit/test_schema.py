"""Schemas that answers are held to: what is served, and every way to be refused, by place."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.api.schema import (
    DEEPEST_SCHEMA,
    LARGEST_BOUND,
    LARGEST_SCHEMA_BYTES,
    LONGEST_PLACE_CHARS,
    MOST_PATTERNS,
    MOST_SUBSCHEMAS,
    check_schema,
)
from pdq.errors import Rejected

TEXT = {"type": "string"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = TEXT
    for _ in range(levels - 1):
        schema = {"type": "object", "properties": {"inner": schema}}
    return schema


def refused(schema: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        check_schema(schema, "s")
    return caught.value


SERVED: dict[str, dict[str, Any]] = {
    "anything": {},
    "an object": {
        "title": "City",
        "description": "Where it is.",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 80, "pattern": "^[A-Z]"},
            "people": {"type": ["integer", "null"], "minimum": 0, "maximum": 1e8, "default": 0},
            "kind": {"enum": ["town", "city", 3, None]},
            "is": {"const": {"any": ["value"]}},
            "tags": {"type": "array", "items": TEXT, "minItems": 0, "maxItems": 5},
            "place": {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "items": False},
        },
        "required": ["name", "people"],
        "additionalProperties": False,
    },
    "choices": {"anyOf": [TEXT, {"oneOf": [{"type": "boolean"}, {"allOf": [TEXT]}]}]},
    "a tree": {
        "$defs": {"n/~": {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}},
        "$ref": "#/$defs/n~1~0",
    },
    "many ways to one place": {
        "$defs": {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(100)} | {"100": TEXT},
    },
    "a map": {"type": "object", "additionalProperties": TEXT, "patternProperties": {"^x": {}}, "required": ["x"]},
    "keywords as names": {"type": "object", "properties": {"not": TEXT, "$ref": TEXT, "type": TEXT}},
    "as deep as can be": nested(DEEPEST_SCHEMA),
    "as many as can be": {"properties": {str(i): TEXT for i in range(MOST_SUBSCHEMAS - 1)}},
    "not unique": {"type": "array", "uniqueItems": False},
}


@pytest.mark.parametrize("schema", SERVED.values(), ids=SERVED.keys())
def test_what_is_served_keeps_its_text(schema: dict[str, Any]) -> None:
    assert json.loads(check_schema(schema, "s")) == schema


REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "no object": ([], "invalid_type", "s", "an array of 0 items"),
    "true": (True, "invalid_type", "s", "true"),
    "odd type": ({"type": "strin"}, "invalid_value", "s.type", "'strin'"),
    "a type of a list": ({"type": ["string", 3]}, "invalid_value", "s.type", "3"),
    "no types": ({"type": []}, "invalid_value", "s.type", "an array of 0"),
    "properties": ({"properties": []}, "invalid_type", "s.properties", "an array of 0"),
    "inner": ({"properties": {"a": {"items": 3}}}, "invalid_type", "s.properties.a.items", "3"),
    "items of a list": ({"items": [TEXT]}, "invalid_type", "s.items", "an array of 1"),
    "a choice of none": ({"anyOf": []}, "invalid_value", "s.anyOf", "at least one"),
    "second choice": ({"anyOf": [TEXT, {"type": "x"}]}, "invalid_value", "s.anyOf[1].type", "'x'"),
    "two of all": ({"allOf": [TEXT, TEXT]}, "unsupported", "s.allOf", "2 schemas"),
    "not": ({"items": {"not": TEXT}}, "unsupported", "s.items.not", "no grammar"),
    "if": ({"if": TEXT, "then": TEXT}, "unsupported", "s.if", "no grammar"),
    "unique": ({"uniqueItems": True}, "unsupported", "s.uniqueItems", "no grammar"),
    "multiple": ({"multipleOf": 2}, "unsupported", "s.multipleOf", "no grammar"),
    "no values": ({"enum": []}, "invalid_value", "s.enum", "at least one"),
    "values": ({"enum": "ab"}, "invalid_value", "s.enum", "'ab'"),
    "length": ({"maxLength": -1}, "invalid_value", "s.maxLength", "-1"),
    "a true length": ({"maxLength": True}, "invalid_value", "s.maxLength", "true"),
    "a large length": ({"minLength": LARGEST_BOUND + 1}, "invalid_value", "s.minLength", str(LARGEST_BOUND)),
    "crossed": ({"minItems": 3, "maxItems": 2}, "invalid_value", "s.minItems", "maxItems"),
    "crossed numbers": ({"minimum": 3, "maximum": 2.5}, "invalid_value", "s.minimum", "maximum"),
    "minimum": ({"minimum": "3"}, "invalid_value", "s.minimum", "'3'"),
    "pattern": ({"pattern": 3}, "invalid_value", "s.pattern", "string"),
    "a long pattern": ({"pattern": "a" * 513}, "invalid_value", "s.pattern", "512"),
    "many patterns": (
        {"prefixItems": [{"pattern": "a"}] * (MOST_PATTERNS + 1)},
        "invalid_value",
        "s",
        f"more than {MOST_PATTERNS}",
    ),
    "required": ({"required": "a"}, "invalid_value", "s.required", "'a'"),
    "cannot be": ({"required": ["a"], "additionalProperties": False}, "invalid_value", "s.required", "'a'"),
    "elsewhere": ({"$ref": "http://x/y"}, "unsupported", "s.$ref", "http://x/y"),
    "nowhere": ({"$ref": "#/$defs/a"}, "invalid_value", "s.$ref", "not in the schema"),
    "no schema there": ({"$ref": "#/title", "title": "a"}, "invalid_value", "s.$ref", "no schema"),
    "what is not looked at": ({"$ref": "#/default", "default": {"not": {}}}, "invalid_value", "s.$ref", "no schema"),
    "a long way": (
        {"items": {"$ref": "#/default/0"}, "default": {str(i): {"$ref": f"#/default/{i + 1}"} for i in range(1200)}},
        "invalid_value",
        "s.items",
        "back to itself",
    ),
    "itself": ({"$ref": "#"}, "invalid_value", "s", "back to itself"),
    "itself, by a choice": ({"anyOf": [TEXT, {"oneOf": [{"$ref": "#"}]}]}, "invalid_value", "s", "back to itself"),
    "round and round": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "invalid_value",
        "s.$defs.a",
        "back to itself",
    ),
    "too deep": (nested(DEEPEST_SCHEMA + 1), "invalid_value", "", str(DEEPEST_SCHEMA)),
    "too many": ({"properties": {str(i): TEXT for i in range(MOST_SUBSCHEMAS)}}, "invalid_value", "s", "subschemas"),
    "too large": ({"title": "a" * LARGEST_SCHEMA_BYTES}, "invalid_value", "s", str(LARGEST_SCHEMA_BYTES)),
}


@pytest.mark.parametrize(("schema", "code", "param", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_is_named_by_its_place(schema: Any, code: str, param: str, named: str) -> None:
    error = refused(schema)
    assert error.code == code, error
    assert error.param is not None and error.param == (param or error.param)
    assert named in str(error) and str(error).startswith(error.param)


def test_a_long_place_is_cut_in_its_middle() -> None:
    error = refused({"properties": {"a" * 50: {"properties": {"b" * 50: {"properties": {"c" * 50: {"type": 3}}}}}}})
    assert error.param is not None and len(error.param) == LONGEST_PLACE_CHARS + 1
    assert error.param.startswith("s.properties.aaa") and error.param.endswith("ccc.type")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "type properties items anyOf allOf $ref required enum minLength pattern $defs const".split()
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_taken_or_refused(schema: Any) -> None:
    try:
        text = check_schema(schema, "s")
    except Rejected:
        return
    assert json.loads(text) == schema
