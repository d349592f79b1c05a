"""How a request is refused: one small set of codes, and one line that names the field, its value and the limit.

code                      meaning
invalid_json              the body is not one JSON object in UTF-8, or it has a field twice
invalid_type              a field has the wrong JSON type
invalid_value             a field or a header is out of its range
invalid_request_id        `Pdq-Request` cannot stand in a subject, or is reserved
missing_field             a field that is needed is absent
unknown_field             a field that no request has
unsupported               a field or value of OpenAI's API that is not served
empty_prompt              nothing to answer
unknown_role              a message's role is none that the chat template knows
unknown_model             no such model in models.toml
model_mismatch            the body names another model than the subject
token_out_of_range        a token id outside the model's vocabulary
context_length_exceeded   the prompt, or the prompt and max_tokens, do not fit into the context

Codes are stable. What a client wrote as its prompt is never quoted, whatever is wrong with it.
"""

from __future__ import annotations

from typing import Any, Literal

from pdq.errors import Rejected

Code = Literal[
    "invalid_json",
    "invalid_type",
    "invalid_value",
    "invalid_request_id",
    "missing_field",
    "unknown_field",
    "unsupported",
    "empty_prompt",
    "unknown_role",
    "unknown_model",
    "model_mismatch",
    "token_out_of_range",
    "context_length_exceeded",
]

SHOWN_CHARS = 40
"""The most characters of a client's value that a message shows."""


def refuse(code: Code, param: str | None, message: str) -> Rejected:
    """The error to raise. `param` is the field in OpenAI's style, or the header's name."""
    return Rejected(message, code=code, param=param)


def shown(value: Any) -> str:
    """A client's value for a message: one line, at most `SHOWN_CHARS` of it; containers by size only."""
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    if isinstance(value, list):
        return f"an array of {len(value)} items"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return _shorten(value)


def field_name(name: str) -> str:
    """A client's own name for a field, as a `param`: printable and short."""
    return ascii(name[:SHOWN_CHARS])[1:-1]


def hidden(value: Any) -> str:
    """A value that may hold a prompt: its kind and size, never its text."""
    return f"a string of {len(value)} characters" if isinstance(value, str) else shown(value)


def _shorten(value: str | int | float) -> str:
    if isinstance(value, str):
        # Cut before it is escaped: a text of 5 kB costs nothing, and no escape is cut in two.
        cut = len(value) > SHOWN_CHARS
        return ascii(value[:SHOWN_CHARS]) + "…" * cut
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
