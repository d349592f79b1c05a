"""`response_format`: what the text of an answer is held to."""

from __future__ import annotations

from typing import Any, Literal

from pdq.api.chat import Name, Strict
from pdq.api.refusals import refuse
from pdq.api.schema import check_schema
from pdq.errors import Rejected

ANY_OBJECT = '{"type":"object"}'


class JsonSchema(Strict, frozen=True, kw_only=True):
    """`strict` is accepted, and changes nothing: an answer is always held to its schema."""

    name: Name
    schema: dict[str, Any]
    description: str = ""
    strict: bool | None = None


class ResponseFormat(Strict, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def guide(self) -> str:
        """As `Sampling.guide`. Raises Rejected, naming the place in the schema."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _odd_schema(self)
        if self.json_schema is not None:
            return check_schema(self.json_schema.schema, "response_format.json_schema.schema")
        return ANY_OBJECT if self.type == "json_object" else ""


def _odd_schema(given: ResponseFormat) -> Rejected:
    param = "response_format.json_schema"
    if given.json_schema is None:
        return refuse("missing_field", param, "response_format has no json_schema; its type 'json_schema' needs it")
    return refuse("invalid_value", param, f"{param} is given; it needs the type 'json_schema', not {given.type!r}")
