"""From an HTTP request to what is submitted: the checks that need no model, the names, the bodies.

A body goes to the router as it came: there the rest is checked, and the same codes come back. Where several choices
are asked for, each has a body of its own: `n` is gone, `seed` is moved on by the choice's number as vLLM does, and
`metadata` tells the choice, so that a body under the same idempotency key with another `n` is another body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from pdq.api.body import Body, ChatBody, CompletionBody, parse_body
from pdq.api.refusals import refuse, shown
from pdq.client import DEADLINE_HEADER, ORDER_HEADER, PRIORITY_HEADER, idempotent_id, new_request_id
from pdq.settings import Models, ModelSpec

from pdq_gateway.errors import failed
from pdq_gateway.naming import MOST_CHOICES, Name, Place

IDEMPOTENCY_HEADER = "Idempotency-Key"
BACKGROUND_HEADER = "Pdq-Background"
RESUME_HEADER = "Last-Event-ID"
PASSED_ON = (DEADLINE_HEADER, PRIORITY_HEADER, ORDER_HEADER)
CHOICE = "pdq.choice"
_KEY = re.compile(r"[\x20-\x7e]{1,255}\Z")

Headers = Mapping[str, str]
"""Names in any case."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that is wanted, as the client described it."""

    name: Name
    bodies: tuple[bytes, ...] = ()
    """One per choice. None: it was submitted before, and is only read."""
    model: str = ""
    headers: dict[str, str] = {}
    """Passed on with the submit."""
    stream: bool = False
    include_usage: bool = False
    background: bool = False
    """It goes on when its client leaves."""
    named: bool = False
    """Named by an idempotency key: the log may have it already."""
    after: Place | None = None
    """Resume after this place of the stream."""

    @property
    def resumable(self) -> bool:
        """Its stream tells its places. Others have none: some readers take an event for its data alone."""
        return self.named or self.background


def read_ask(raw: bytes, headers: Headers, kind: type[ChatBody] | type[CompletionBody], models: Models) -> Ask:
    """A request to be submitted. Raises Rejected, or Failed (a model that is not there)."""
    body = parse_body(raw, most_choices=MOST_CHOICES)
    _check_kind(body, kind)
    key, after = _key(headers), resume_after(headers)
    if after is not None and (not key or not body.stream):
        expected = f"it resumes a stream, by the {IDEMPOTENCY_HEADER} that it was asked for with"
        raise refuse("invalid_value", RESUME_HEADER, f"{RESUME_HEADER} is given; {expected}")
    name = Name(idempotent_id(key) if key else new_request_id(), body.n)
    check_place(after, name)
    return Ask(
        name=name,
        bodies=_bodies(raw, body),
        model=_model(body, models).slug,
        headers={name: headers[name] for name in PASSED_ON if name in headers},
        stream=body.stream,
        include_usage=_include_usage(body),
        background=_background(headers),
        named=bool(key),
        after=after,
    )


def resume_after(headers: Headers) -> Place | None:
    """The place that `Last-Event-ID` names. Raises Rejected."""
    text = headers.get(RESUME_HEADER)
    if text is None:
        return None
    place = Place.parse(text)
    if place is None:
        raise refuse("invalid_value", RESUME_HEADER, f"{RESUME_HEADER} is {shown(text)}; expected an id of a stream")
    return place


def check_place(after: Place | None, name: Name) -> None:
    """Raise Rejected for a place in a stream of another number of choices."""
    if after is not None and len(after.seqs) != name.choices:
        expected = f"expected one of a stream of {name.choices} choices"
        raise refuse("invalid_value", RESUME_HEADER, f"{RESUME_HEADER} is {shown(str(after))}; {expected}")


def _check_kind(body: Body, kind: type[ChatBody] | type[CompletionBody]) -> None:
    if not isinstance(body, kind):
        needed, other = ("messages", "prompt") if kind is ChatBody else ("prompt", "messages")
        raise refuse("missing_field", needed, f"body has {other}, but no {needed}; {needed} is required here")


def _model(body: Body, models: Models) -> ModelSpec:
    if body.model is None:
        raise refuse("missing_field", "model", "body has no model; it is required")
    return find_model(models, body.model)


def find_model(models: Models, name: str) -> ModelSpec:
    """By public id or slug. Raises Failed, naming those there are."""
    spec = models.find(name)
    if spec is None:
        known = ", ".join(sorted(spec.id for spec in models.by_slug.values()))
        raise failed("unknown_model", f"model is {shown(name)}; expected one of {known}", "model")
    return spec


def _include_usage(body: Body) -> bool:
    if body.stream_options is None:
        return False
    if not body.stream:
        raise refuse("invalid_value", "stream_options", "stream_options is given; it needs stream: true")
    return body.stream_options.include_usage


def _key(headers: Headers) -> str:
    key = headers.get(IDEMPOTENCY_HEADER)
    if key is not None and not _KEY.match(key):
        described = f"{IDEMPOTENCY_HEADER} has {len(key)} characters"
        raise refuse("invalid_value", IDEMPOTENCY_HEADER, f"{described}; expected 1 to 255 printable ones of ASCII")
    return key or ""


def _background(headers: Headers) -> bool:
    text = headers.get(BACKGROUND_HEADER, "false")
    if text not in ("true", "false"):
        described = f"{BACKGROUND_HEADER} is {shown(text)}"
        raise refuse("invalid_value", BACKGROUND_HEADER, f"{described}; expected true or false")
    return text == "true"


def _bodies(raw: bytes, body: Body) -> tuple[bytes, ...]:
    if body.n == 1:
        return (raw,)
    fields = msgspec.json.decode(raw)
    del fields["n"]
    return tuple(msgspec.json.encode(fields | _own(body, index)) for index in range(body.n))


def _own(body: Body, index: int) -> dict[str, object]:
    """What differs between the choices of one body."""
    own: dict[str, object] = {"metadata": body.metadata | {CHOICE: f"{index} of {body.n}"}}
    if body.seed is not None:
        own["seed"] = _signed(body.seed + index)
    return own


def _signed(number: int) -> int:
    """Within the range of a seed, from its end on from its beginning."""
    return (number + 2**63) % 2**64 - 2**63


def read_name(public: str, prefix: str) -> Name:
    """The name of an answer that was asked for before. Raises Failed."""
    name = Name.parse(public, prefix)
    if name is None:
        raise not_found(public)
    return name


def not_found(public: str) -> Exception:
    return failed("not_found", f"there is no answer {shown(public)}", "id")
