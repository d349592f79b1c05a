"""JSON schemas that an answer can be held to: what is served, and how large one may be.

A guided answer is checked by nobody afterwards, so a keyword that no grammar enforces is refused by its place, and
never dropped in silence. So is a schema that nothing satisfies, as far as it shows, and one that refers only to itself:
an engine would have no token to choose. Annotations (`title`, `description`, `default`, ...) are let through.

Cost of the largest schema: a second or two of one core, in each engine that compiles it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pdq.api.refusals import Code, field_name, refuse, shown
from pdq.errors import Rejected

LARGEST_SCHEMA_BYTES = 65_536
MOST_SUBSCHEMAS = 500
DEEPEST_SCHEMA = 32
MOST_PATTERNS = 50
LONGEST_PATTERN_CHARS = 512
LARGEST_BOUND = 10_000
"""Of lengths and of numbers of items: a grammar counts each one."""

LONGEST_PLACE_CHARS = 120
"""Of a place in a message; beyond it the middle is left out."""

TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})

NOT_ENFORCED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies uniqueItems contains minContains maxContains "
    "multipleOf unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef".split()
)
SUBSCHEMA = frozenset({"items", "additionalProperties", "propertyNames", "additionalItems"})
"""Keywords whose value is a schema; then those that have an array, and an object, of schemas."""
SUBSCHEMAS_IN_ORDER = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SUBSCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def check_schema(schema: Any, place: str) -> str:
    """The text of a schema that can guide an answer. `place` is its field, as in `response_format.json_schema.schema`.

    Raises Rejected, naming the place within it.
    """
    text = msgspec.json.encode(schema)
    if len(text) > LARGEST_SCHEMA_BYTES:
        raise _bad(place, f"has {len(text)} bytes of JSON; expected at most {LARGEST_SCHEMA_BYTES}")
    if not isinstance(schema, dict):
        raise _bad(place, f"is {shown(schema)}; expected an object", "invalid_type")
    _Check(schema, place).run()
    return text.decode()


class _Check:
    """One schema's check. Subschemas are visited once, in order; references only lead to them."""

    def __init__(self, root: dict[str, Any], place: str) -> None:
        self._root = root
        self._place = place
        self._subschemas = 0
        self._patterns = 0
        self._visited: set[int] = set()
        self._followed: set[int] = set()
        self._referred: list[tuple[Any, str]] = []

    def run(self) -> None:
        self._visit(self._root, self._place, 1)
        for target, place in self._referred:
            if isinstance(target, dict) and id(target) not in self._visited:
                raise _bad(f"{place}.$ref", "leads to what is no schema")

    def _visit(self, schema: Any, place: str, depth: int) -> None:
        self._count(place, depth)
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _bad(place, f"is {shown(schema)}; expected a schema: an object or a boolean", "invalid_type")
        self._visited.add(id(schema))
        for name in schema:
            if name in NOT_ENFORCED and schema[name] is not False:
                raise _bad(f"{place}.{name}", "is not served: no grammar enforces it", "unsupported")
        self._check_types(schema, place)
        self._check_values(schema, place)
        self._check_object(schema, place)
        self._follow(schema, place)
        for child, where in _children(schema, place):
            self._visit(child, where, depth + 1)

    def _count(self, place: str, depth: int) -> None:
        self._subschemas += 1
        if self._subschemas > MOST_SUBSCHEMAS:
            raise _bad(self._place, f"has more than {MOST_SUBSCHEMAS} subschemas")
        if depth > DEEPEST_SCHEMA:
            raise _bad(place, f"is nested deeper than {DEEPEST_SCHEMA} schemas")

    def _check_types(self, schema: dict[str, Any], place: str) -> None:
        if "type" not in schema:
            return
        given = schema["type"]
        kinds = given if isinstance(given, list) and given else [given]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in TYPES:
                raise _bad(f"{place}.type", f"is {shown(kind)}; expected one of {', '.join(sorted(TYPES))}")

    def _check_values(self, schema: dict[str, Any], place: str) -> None:
        if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
            raise _bad(f"{place}.enum", f"is {shown(schema['enum'])}; expected an array of at least one value")
        for name in _COUNTS:
            if name in schema and not (_is_number(schema[name], int) and 0 <= schema[name] <= LARGEST_BOUND):
                raise _bad(
                    f"{place}.{name}", f"is {shown(schema[name])}; expected an integer from 0 to {LARGEST_BOUND}"
                )
        for name in _NUMBERS:
            if name in schema and not _is_number(schema[name], int | float):
                raise _bad(f"{place}.{name}", f"is {shown(schema[name])}; expected a number")
        for low, high in (*zip(_COUNTS[::2], _COUNTS[1::2], strict=True), ("minimum", "maximum")):
            if low in schema and high in schema and schema[low] > schema[high]:
                raise _bad(f"{place}.{low}", f"is {shown(schema[low])}, more than {high}: nothing satisfies both")
        if "pattern" in schema:
            self._check_pattern(schema["pattern"], f"{place}.pattern")
        for name in schema.get("patternProperties") or ():
            self._check_pattern(name, f"{place}.patternProperties")

    def _check_pattern(self, pattern: Any, place: str) -> None:
        self._patterns += 1
        if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN_CHARS:
            raise _bad(place, f"is no string of at most {LONGEST_PATTERN_CHARS} characters")
        if self._patterns > MOST_PATTERNS:
            raise _bad(self._place, f"has more than {MOST_PATTERNS} patterns")

    def _check_object(self, schema: dict[str, Any], place: str) -> None:
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _bad(f"{place}.required", f"is {shown(required)}; expected an array of names")
        if schema.get("additionalProperties") is not False or "patternProperties" in schema:
            return
        for name in required:
            if name not in (schema.get("properties") or {}):
                raise _bad(f"{place}.required", f"names {shown(name)}, which is no property and may not be added")

    def _follow(self, schema: Any, place: str, passed: frozenset[int] = frozenset()) -> None:
        """References and choices lead to something else than themselves."""
        if not isinstance(schema, dict) or id(schema) in self._followed:
            return
        if id(schema) in passed or len(passed) > MOST_SUBSCHEMAS:
            raise _bad(place, "leads back to itself")
        if "$ref" in schema:
            self._follow(self._found(schema["$ref"], place), place, passed | {id(schema)})
        for name in ("anyOf", "oneOf", "allOf"):
            for choice in schema[name] if isinstance(schema.get(name), list) else ():
                self._follow(choice, place, passed | {id(schema)})
        self._followed.add(id(schema))

    def _found(self, target: Any, place: str) -> Any:
        if not isinstance(target, str) or not target.startswith("#"):
            raise _bad(f"{place}.$ref", f"is {shown(target)}; expected # and a place in the schema", "unsupported")
        value: Any = self._root
        for part in target[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(value, dict) or name not in value:
                raise _bad(f"{place}.$ref", f"is {shown(target)}, which is not in the schema")
            value = value[name]
        if not isinstance(value, dict | bool):
            raise _bad(f"{place}.$ref", f"is {shown(target)}, which is no schema")
        self._referred.append((value, place))
        return value


def _children(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Its subschemas, each with its place. Raises Rejected for a keyword that holds none."""
    for name, value in schema.items():
        where = f"{place}.{name}"
        if name in SUBSCHEMA:
            yield value, where
        elif name in SUBSCHEMAS_IN_ORDER:
            yield from _of_list(value, name, where)
        elif name in SUBSCHEMAS_BY_NAME:
            if not isinstance(value, dict):
                raise _bad(where, f"is {shown(value)}; expected an object of schemas", "invalid_type")
            for key, child in value.items():
                yield child, f"{where}.{field_name(key)}"


def _of_list(children: Any, name: str, place: str) -> Iterator[tuple[Any, str]]:
    if not isinstance(children, list) or not children:
        raise _bad(place, f"is {shown(children)}; expected an array of at least one schema")
    if name == "allOf" and len(children) > 1:
        raise _bad(place, f"has {len(children)} schemas; only one is served", "unsupported")
    for index, child in enumerate(children):
        yield child, f"{place}[{index}]"


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _bad(place: str, verdict: str, code: Code = "invalid_value") -> Rejected:
    if len(place) > LONGEST_PLACE_CHARS:
        place = f"{place[: LONGEST_PLACE_CHARS // 2]}…{place[-LONGEST_PLACE_CHARS // 2 :]}"
    return refuse(code, place, f"{place} {verdict}")
