"""The shapes of responses (`/v1/responses`): the object, what it is made of, and the events that tell of it.

A field that is null, or has its default, where nothing but the log tells of a response, is marked `asked`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from pdq.api.responses_body import FunctionChoice, FunctionTool, TextConfig
from pdq.messages import TokenLogprob, TopLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """All fields are written, also those that have their defaults."""


# ---- what a response is made of


class TopTextLogprob(_Shape, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    """The token's UTF-8; empty where the token holds a part of a character."""


class TextLogprob(TopTextLogprob, frozen=True, kw_only=True):
    top_logprobs: tuple[TopTextLogprob, ...]


def text_logprobs(entries: Sequence[TokenLogprob]) -> tuple[TextLogprob, ...]:
    return tuple(
        TextLogprob(
            token=entry.token,
            logprob=entry.logprob,
            bytes=_utf8(entry.token),
            top_logprobs=tuple(map(_top, entry.top)),
        )
        for entry in entries
    )


def _top(top: TopLogprob) -> TopTextLogprob:
    return TopTextLogprob(token=top.token, logprob=top.logprob, bytes=_utf8(top.token))


def _utf8(token: str) -> tuple[int, ...]:
    return () if "\ufffd" in token else tuple(token.encode())


class OutputText(_Shape, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TextLogprob, ...] = ()


class ReasoningText(_Shape, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(_Shape, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: tuple[OutputText, ...] = ()


class OutputReasoning(_Shape, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()


class OutputCall(_Shape, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    """JSON as text; cut short where the answer is."""


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(_Shape, frozen=True, kw_only=True):
    cached_tokens: int = 0
    """Whose KV was there and was not computed for this response."""
    cache_write_tokens: int = 0


class OutputTokensDetails(_Shape, frozen=True, kw_only=True):
    reasoning_tokens: int = 0
    """Of the records of the log that have reasoning: up to a record's tokens too many."""


class ResponseUsage(_Shape, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(_Shape, frozen=True, kw_only=True):
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None = None
    type: str
    """pdq's own code."""


class IncompleteDetails(_Shape, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class NoReasoning(_Shape, frozen=True, kw_only=True):
    effort: None = None
    summary: None = None


class Response(_Shape, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix seconds: when the broker stored the request."""
    completed_at: int | None = None
    status: Status
    background: bool | None = None
    """Asked."""
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    """Asked."""
    max_output_tokens: int | None = None
    """The most that may be generated, once the request is routed."""
    max_tool_calls: None = None
    metadata: dict[str, str] | None = None
    """Asked."""
    model: str
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool = True
    """Asked."""
    previous_response_id: None = None
    prompt_cache_key: str | None = None
    """Asked."""
    reasoning: NoReasoning = NoReasoning()
    safety_identifier: str | None = None
    """Asked."""
    service_tier: Literal["default"] = "default"
    store: bool = True
    temperature: float | None = None
    """Asked."""
    text: TextConfig | None = None
    """Asked."""
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    """Asked."""
    tools: tuple[FunctionTool, ...] = ()
    """Asked."""
    top_logprobs: int | None = None
    """Asked."""
    top_p: float | None = None
    """Asked."""
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    """Asked."""


class ResponseDeleted(_Shape, frozen=True, kw_only=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


# ---- events


class _Event(_Shape, frozen=True, kw_only=True):
    type: Any
    sequence_number: int


class ResponseEvent(_Event, frozen=True, kw_only=True):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ItemEvent(_Event, frozen=True, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(_Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class PartEvent(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0] = 0
    part: OutputText | ReasoningText


class TextDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: Literal[0] = 0
    delta: str
    logprobs: tuple[TextLogprob, ...] = ()


class TextDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: Literal[0] = 0
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


class ReasoningDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    content_index: Literal[0] = 0
    delta: str


class ReasoningDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    content_index: Literal[0] = 0
    text: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


EVENTS = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ReasoningDelta,
    ReasoningDone,
    ArgumentsDelta,
    ArgumentsDone,
)
StreamEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
