"""What a line asks for: OpenAI's batch shape (`custom_id`, `method`, `url`, `body`), or just a body.

Only what is needed to send it is looked at here; the router checks the rest, and its refusal is the line's error. A
body goes out byte for byte as it stands in the line. `stream` in it changes nothing: an answer is written when it is
whole.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pdq import subjects
from pdq.api.refusals import refuse, shown
from pdq.batch.lines import Line
from pdq.errors import Rejected
from pdq.settings import Models

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NEEDED = {CHAT: "messages", COMPLETIONS: "prompt"}
"""By url, the field that its bodies have."""
LONGEST_ID_CHARS = 512

Fields = dict[str, msgspec.Raw]


class Item(msgspec.Struct, frozen=True):
    """One request. `model`: the slug that it is submitted to."""

    number: int
    custom_id: str
    url: str
    model: str
    body: bytes

    @property
    def digest(self) -> bytes:
        """SHA-256 of all that its answer depends on."""
        return hashlib.sha256(f"{self.url} {self.model} ".encode() + self.body).digest()


class BadLine(Rejected):
    """A line that asks for nothing that could be sent. `custom_id`: None where it has none that can be read."""

    def __init__(self, why: Rejected, custom_id: str | None = None) -> None:
        super().__init__(str(why), code=why.code, param=why.param)
        self.custom_id = custom_id


def read_item(line: Line, models: Models | None, default_model: str) -> Item:
    """The request of a line. `default_model`: of bodies that name none; empty: they must. Raises BadLine."""
    custom_id = None
    try:
        fields = _object(line.data, "the line") if not line.too_long else _too_long(line)
        if _is_body(fields):
            custom_id, url, body = str(line.number), "", line.data
        else:
            custom_id = _text(fields, "custom_id", LONGEST_ID_CHARS)
            url, body, fields = _url(fields), *_body(fields)
        url = _checked_url(url, fields)
        return Item(line.number, custom_id, url, _model(fields, models, default_model), body)
    except Rejected as exc:
        raise BadLine(exc, custom_id) from None


def _too_long(line: Line) -> Fields:
    raise Rejected(f"the line has {line.num_bytes} bytes, more than any request", code="payload_too_large")


def _object(data: bytes | msgspec.Raw, what: str) -> Fields:
    try:
        return msgspec.json.decode(data, type=Fields)
    except RecursionError:
        raise refuse("invalid_json", None, f"{what} is nested too deeply") from None
    except msgspec.ValidationError:
        raise refuse("invalid_json", None, f"{what} is not a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise refuse("invalid_json", None, f"{what} is not JSON: {exc}") from None


def _is_body(fields: Fields) -> bool:
    """Whether it is a body without OpenAI's envelope."""
    return not fields.keys() & {"custom_id", "method", "url", "body"}


def _url(fields: Fields) -> str:
    method = _text(fields, "method") if "method" in fields else "POST"
    if method != "POST":
        raise refuse("unsupported", "method", f"method is {shown(method)}; expected POST")
    return _text(fields, "url")


def _body(fields: Fields) -> tuple[bytes, Fields]:
    if "body" not in fields:
        raise refuse("missing_field", "body", "the line has no body")
    return bytes(fields["body"]), _object(fields["body"], "body")


def _checked_url(url: str, body: Fields) -> str:
    """The url; of a body without an envelope that of its kind."""
    if not url:
        url = COMPLETIONS if "prompt" in body else CHAT
    if url not in NEEDED:
        raise refuse("unsupported", "url", f"url is {shown(url)}; expected {CHAT} or {COMPLETIONS}")
    if NEEDED[url] not in body:
        raise refuse("missing_field", NEEDED[url], f"body has no {NEEDED[url]}, which {url} needs")
    return url


def _model(body: Fields, models: Models | None, default_model: str) -> str:
    """The slug to submit to. A model that is not known here is the router's to refuse."""
    if "model" not in body and not default_model:
        raise refuse("missing_field", "model", "body has no model; name one there, or for all lines with --model")
    name = _text(body, "model") if "model" in body else default_model
    known = models.find(name) if models is not None else None
    return known.slug if known is not None else subjects.slug(name)


def _text(fields: Fields, name: str, most_chars: int = 0) -> str:
    if name not in fields:
        raise refuse("missing_field", name, f"the line has no {name}")
    try:
        value: Any = msgspec.json.decode(fields[name])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise refuse("invalid_json", name, f"{name} is not JSON: an escape, a number or its UTF-8 is wrong") from None
    if not isinstance(value, str) or not value:
        raise refuse("invalid_type", name, f"{name} is {shown(value)}; expected a string that is not empty")
    if most_chars and len(value) > most_chars:
        raise refuse("invalid_value", name, f"{name} has {len(value)} characters; at most {most_chars}")
    return value
