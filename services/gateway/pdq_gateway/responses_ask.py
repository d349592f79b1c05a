"""From an HTTP request for a response to the chat that is submitted for it."""

from __future__ import annotations

from typing import Any

import msgspec
from pdq import subjects
from pdq.api.body import ChatBody
from pdq.api.refusals import refuse
from pdq.api.responses_body import ResponsesBody, TextConfig, TextFormat, parse_responses_body
from pdq.api.responses_chat import renamed, translate
from pdq.errors import Rejected
from pdq.settings import Models

from pdq_gateway.ask import IDEMPOTENCY_HEADER, Ask, Headers, not_found, read_ask, resume_after
from pdq_gateway.errors import Failed, info_of
from pdq_gateway.naming import Name, Place
from pdq_gateway.responses_making import PREFIX


class ResponseAsk(msgspec.Struct, frozen=True, kw_only=True):
    ask: Ask
    """Its `after` holds a `sequence_number`."""
    asked: dict[str, Any] = {}
    """Fields of the response that only its request tells. None: it was asked for before."""
    store: bool = True
    """False: remove it when it has been answered."""
    at_once: bool = False
    """Answer when it is queued."""


def read_response_ask(raw: bytes, headers: Headers, models: Models) -> ResponseAsk:
    """A response that is wanted. Raises Rejected, or Failed, in the words of its request."""
    body = parse_responses_body(raw)
    chat = translate(body)
    try:
        ask = read_ask(chat.body, headers, ChatBody, models)
    except Rejected as exc:
        raise Failed(renamed(info_of(exc), chat.places)) from None
    if ask.named and not body.store:
        message = f"store is false, and {IDEMPOTENCY_HEADER} given: what is not kept cannot be asked for again"
        raise refuse("invalid_value", "store", message)
    return ResponseAsk(
        ask=msgspec.structs.replace(ask, background=ask.background or body.background),
        asked=asked(body),
        store=body.store,
        at_once=body.background and not body.stream,
    )


def asked(body: ResponsesBody) -> dict[str, Any]:
    """What a response repeats of its request."""
    repeated = (
        "background instructions metadata parallel_tool_calls prompt_cache_key safety_identifier store temperature "
        "tool_choice tools top_logprobs top_p user".split()
    )
    text = body.text if body.text is not None and body.text.format is not None else None
    found = {name: getattr(body, name) for name in repeated}
    return found | {
        "metadata": body.metadata or {},
        "text": text or TextConfig(format=TextFormat(type="text")),
    }


def read_again(id: str, headers: Headers, *, starting_after: int | None = None, stream: bool = False) -> ResponseAsk:
    """A response that was asked for before, by its id. Raises Failed, or Rejected."""
    request = id.removeprefix(PREFIX)
    if request == id or not subjects.is_token(request):
        raise not_found(id)
    after = resume_after(headers)
    if after is not None and (len(after.seqs) != 1 or after.end):
        raise refuse("invalid_value", "Last-Event-ID", f"Last-Event-ID is {after}; expected a sequence_number")
    if starting_after is not None and (starting_after < 0 or not stream):
        described = f"starting_after is {starting_after}"
        raise refuse("invalid_value", "starting_after", f"{described}; expected a sequence_number, and stream=true")
    # A reader that reconnects repeats its first question, and says by the header what it has by now.
    if after is None and starting_after is not None:
        after = Place((starting_after,))
    return ResponseAsk(ask=Ask(name=Name(request), stream=stream, background=True, after=after))
