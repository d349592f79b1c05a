"""From a submit message to a job's contents: the model, the prompt's token ids, the sampling, the headers.

Pure: the same message gives the same result, whenever and however often it is routed. So the seed follows from
the request's id, and the deadline is a duration, to be added to the broker's stored time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TypeVar, get_args

import msgspec
from pdq import subjects
from pdq.api.body import Body, ChatBody, parse_body
from pdq.api.refusals import Code, refuse, shown
from pdq.client import (
    DEADLINE_HEADER,
    ORDER_HEADER,
    PRIORITY_HEADER,
    REPLAY_HEADER,
    REQUEST_HEADER,
    SITE_SEQ_HEADER,
    SITE_TIME_HEADER,
    SITE_TOO_LARGE_HEADER,
)
from pdq.errors import Rejected
from pdq.messages import PRIORITIES, AskedOrder, Priority, Sampling, Tools
from pdq.settings import Models, ModelSpec

from pdq_router.tokens import Tokenizer, check_ids

ORDERS: tuple[AskedOrder, ...] = get_args(AskedOrder)
SEED_MASK = 2**63 - 1
NUMBER = re.compile(r"[1-9][0-9]{0,18}\Z")
SITE_TIME = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?\Z")

Headers = Mapping[str, str]
Choice = TypeVar("Choice", bound=str)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is made of. `sampling` is complete: max_tokens and seed are set, and fit the model."""

    spec: ModelSpec
    prompt: tuple[int, ...]
    sampling: Sampling


def prepare(
    raw: bytes,
    *,
    subject_model: str,
    request: str,
    models: Models,
    tokenizers: Mapping[str, Tokenizer],
    default_max_tokens: int,
) -> Prepared:
    """Validate and tokenise a submitted body.

    `subject_model` is the slug in the subject, `tokenizers` are by slug. An absent max_tokens becomes
    `default_max_tokens`, or what is left of the context. Raises Rejected, and nothing else.
    Time is that of tokenising (tokens.py): for bodies beyond `INLINE_BYTES`, call it in a thread.
    """
    spec = find_model(models, subject_model)
    body = parse_body(raw)
    _check_model(body, spec)
    tools = _tools(body, spec)
    prompt = _tokenise(body, spec, tokenizers[spec.slug])
    sampling = _sampling(body, spec, len(prompt), request, default_max_tokens)
    parsed = tools is not None or (isinstance(body, ChatBody) and bool(spec.reasoning_parser))
    sampling = msgspec.structs.replace(sampling, tools=tools, parsed=parsed)
    return Prepared(spec=spec, prompt=tuple(prompt), sampling=sampling)


def find_model(models: Models, slug: str) -> ModelSpec:
    """The model of a submit subject: by its own slug, or by the slug of its id (what `pdq.client` makes of a
    public name). Raises Rejected, naming those there are."""
    if spec := models.get(slug):
        return spec
    for other in models.by_slug.values():
        if subjects.slug(other.id) == slug:
            return other
    known = ", ".join(sorted(models.by_slug))
    raise refuse("unknown_model", "model", f"model is {shown(slug)}; expected one of {known}")


def _check_model(body: Body, spec: ModelSpec) -> None:
    if body.model not in (None, spec.slug, spec.id):
        expected = f"expected {spec.slug} or {spec.id}, the model of the subject"
        raise refuse("model_mismatch", "model", f"model is {shown(body.model)}; {expected}")


def _tools(body: Body, spec: ModelSpec) -> Tools | None:
    tools = body.tool_use() if isinstance(body, ChatBody) else None
    if tools is not None and not spec.tool_parser:
        message = f"tools are not served for {spec.slug}: its table in models.toml names no tool_parser"
        raise refuse("unsupported", "tools", message)
    return tools


def _tokenise(body: Body, spec: ModelSpec, tokenizer: Tokenizer) -> list[int]:
    if isinstance(body, ChatBody):
        tools = [] if body.tool_choice == "none" else [tool.shown() for tool in body.tools]
        param, ids = "messages", tokenizer.encode_chat([message.turn() for message in body.messages], tools)
    elif isinstance(body.prompt, str):
        param, ids = "prompt", tokenizer.encode(body.prompt)
    else:
        param, ids = "prompt", body.prompt
    _check_prompt(param, ids, spec)
    return ids


def _check_prompt(param: str, ids: list[int], spec: ModelSpec) -> None:
    """At the exact limit one token can be produced."""
    room = spec.max_model_len - 1
    if len(ids) > room:
        held = f"{param} has {len(ids)} tokens, {len(ids) - room} more than the {room} that fit"
        context = f"the context of {spec.slug} is {spec.max_model_len} tokens, one of them for the answer"
        raise refuse("context_length_exceeded", param, f"{held}: {context}")
    if not ids:
        raise refuse("empty_prompt", param, f"{param} has no tokens; expected at least one")
    check_ids(ids, spec.vocab_size, param)


def _sampling(body: Body, spec: ModelSpec, prompt_tokens: int, request: str, default_max_tokens: int) -> Sampling:
    max_tokens = _max_tokens(body, spec, prompt_tokens, default_max_tokens)
    if body.min_tokens > max_tokens:
        message = f"min_tokens is {shown(body.min_tokens)}; expected at most max_tokens, which is {max_tokens}"
        raise refuse("invalid_value", "min_tokens", message)
    check_ids(body.stop_token_ids, spec.vocab_size, "stop_token_ids")
    return Sampling(
        max_tokens=max_tokens,
        seed=derived_seed(request) if body.seed is None else body.seed & SEED_MASK,
        seeded=body.seed is not None,
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        top_k=body.top_k,
        min_p=body.min_p,
        stop=body.stops(),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        logit_bias=_bias(body, spec),
        logprobs=body.num_logprobs(),
        guide=body.guide(),
    )


def _max_tokens(body: Body, spec: ModelSpec, prompt_tokens: int, default: int) -> int:
    room = spec.max_model_len - prompt_tokens
    param, asked = body.limit()
    if asked is None:
        return min(default, room)
    if asked < 1:
        raise refuse("invalid_value", param, f"{param} is {shown(asked)}; expected 1 to {room}")
    if asked > room:
        held = f"{param} is {shown(asked)}, {shown(asked - room)} more than the {room} that fit"
        context = f"beside a prompt of {prompt_tokens} tokens in the context of {spec.max_model_len}"
        raise refuse("context_length_exceeded", param, f"{held} {context}")
    return asked


def _bias(body: Body, spec: ModelSpec) -> dict[int, float]:
    bias = body.bias()
    for token in bias:
        if token >= spec.vocab_size:
            message = f"logit_bias has the token id {token}; expected one from 0 to {spec.vocab_size - 1}"
            raise refuse("token_out_of_range", f"logit_bias.{token}", message)
    return bias


def derived_seed(request: str) -> int:
    """The seed of a request that names none: 63 bits of its id's hash."""
    return int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big") & SEED_MASK


# Headers. An absent one means the default; an empty one is a bad value.


def request_id(headers: Headers, submit_seq: int) -> str:
    """The request's name: the client's, else that of its sequence, which is also the name a request with a bad name
    fails under. Raises Rejected for a name that cannot stand in a subject, or is reserved."""
    name = headers.get(REQUEST_HEADER)
    if name is None:
        return sequence_id(headers, submit_seq)
    if not subjects.is_token(name):
        raise _bad_header("invalid_request_id", REQUEST_HEADER, name, "1 to 64 of A-Z a-z 0-9 _ -")
    if subjects.is_reserved(name):
        expected = "a name that does not begin with the reserved s-, nor is e- and a number"
        raise _bad_header("invalid_request_id", REQUEST_HEADER, name, expected)
    return name


def sequence_id(headers: Headers, submit_seq: int) -> str:
    """The name by the sequence that the client's acknowledgement told: `e-<sequence at its site>` where it came by way
    of one, else `s-<submit sequence>`. (A header that no forwarder writes counts as none, here and below.)"""
    site_seq = headers.get(SITE_SEQ_HEADER, "")
    if NUMBER.match(site_seq):
        return subjects.sequence_name(subjects.EDGE, site_seq)
    return subjects.sequence_name(subjects.SUBMIT, submit_seq)


def began_s(headers: Headers, stored_s: float) -> float:
    """When the request's deadline begins to count, Unix seconds: when its site stored it, and not after the hub did."""
    site_time = headers.get(SITE_TIME_HEADER, "")
    return min(float(site_time), stored_s) if SITE_TIME.match(site_time) else stored_s


def check_arrived(headers: Headers) -> None:
    """Raise Rejected for a request whose body did not come here from its site."""
    size = headers.get(SITE_TOO_LARGE_HEADER, "")
    if NUMBER.match(size):
        raise Rejected(f"the body has {size} bytes, more than the hub takes from a site", code="payload_too_large")


def deadline_s(headers: Headers, *, default_s: float, max_s: float) -> float:
    """How long after `began_s` the request expires, in seconds. Raises Rejected."""
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return min(default_s, max_s)
    try:
        # Python's float() also takes nan, inf, underscores, spaces and other scripts' digits.
        seconds = float(text) if re.fullmatch(r"[0-9eE.+-]{1,32}", text) else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= max_s:
        raise _bad_header("invalid_value", DEADLINE_HEADER, text, f"seconds, more than 0 and at most {max_s:g}")
    return seconds


def priority(headers: Headers) -> Priority:
    """The request's priority; `normal` when it names none. Raises Rejected."""
    return _one_of(headers, PRIORITY_HEADER, PRIORITIES) or "normal"


def requested_order(headers: Headers) -> AskedOrder | None:
    """The order that the request asks for, if any. Raises Rejected."""
    return _one_of(headers, ORDER_HEADER, ORDERS)


def replay_of(headers: Headers) -> str:
    """The request whose dead letter this one was made of; empty for all others. Raises Rejected."""
    name = headers.get(REPLAY_HEADER)
    if name is not None and not subjects.is_token(name):
        raise _bad_header("invalid_request_id", REPLAY_HEADER, name, "1 to 64 of A-Z a-z 0-9 _ -")
    return name or ""


def _one_of(headers: Headers, name: str, choices: tuple[Choice, ...]) -> Choice | None:
    text = headers.get(name)
    if text is None:
        return None
    for choice in choices:
        if choice == text:
            return choice
    raise _bad_header("invalid_value", name, text, f"one of {', '.join(choices)}")


def _bad_header(code: Code, name: str, value: str, expected: str) -> Rejected:
    return refuse(code, name, f"{name} is {shown(value)}; expected {expected}")
