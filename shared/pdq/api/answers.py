"""The shapes of answers: OpenAI's chat completions, completions, models and errors, whole and in stream chunks.

Text deltas are whole characters. A field that OpenAI's clients read as null is null; one that is for some answers
only (`usage` of a chunk, the parts of a delta) is absent from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pdq import messages
from pdq.messages import CallDelta, FinishReason, TokenLogprob, TopLogprob, Usage


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """All fields are written, also those that have their defaults."""


# ---- log probabilities


class ChatTopLogprob(_Shape, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    """The token's UTF-8; null where the token holds a part of a character."""


class ChatTokenLogprob(ChatTopLogprob, frozen=True, kw_only=True):
    top_logprobs: tuple[ChatTopLogprob, ...]


class ChatLogprobs(_Shape, frozen=True, kw_only=True):
    content: tuple[ChatTokenLogprob, ...]


class CompletionLogprobs(_Shape, frozen=True, kw_only=True):
    """Lists of equal length, an entry per token."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    """The most likely tokens, and the sampled one."""
    text_offset: tuple[int, ...]
    """Where each token begins in the answer, in characters."""


def chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    if logprobs is None:
        return None
    return ChatLogprobs(
        content=tuple(
            ChatTokenLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=_utf8(entry.token),
                top_logprobs=tuple(map(_chat_top, entry.top)),
            )
            for entry in logprobs
        )
    )


def _chat_top(top: TopLogprob) -> ChatTopLogprob:
    return ChatTopLogprob(token=top.token, logprob=top.logprob, bytes=_utf8(top.token))


def _utf8(token: str) -> tuple[int, ...] | None:
    return None if "\ufffd" in token else tuple(token.encode())


def completion_logprobs(logprobs: Sequence[TokenLogprob] | None, offset: int) -> CompletionLogprobs | None:
    """`offset`: the characters of the tokens before."""
    if logprobs is None:
        return None
    offsets = []
    for entry in logprobs:
        offsets.append(offset)
        offset += len(entry.token)
    return CompletionLogprobs(
        tokens=tuple(entry.token for entry in logprobs),
        token_logprobs=tuple(entry.logprob for entry in logprobs),
        top_logprobs=tuple(map(_by_token, logprobs)),
        text_offset=tuple(offsets),
    )


def _by_token(entry: TokenLogprob) -> dict[str, float]:
    """Most likely first; of several tokens that read the same (parts of characters) the most likely."""
    found: dict[str, float] = {}
    for top in entry.top:
        found.setdefault(top.token, top.logprob)
    found.setdefault(entry.token, entry.logprob)
    return found


# ---- chat completions


class Function(_Shape, frozen=True, kw_only=True):
    name: str
    arguments: str
    """JSON as text; cut short where the answer is."""


class ToolCall(_Shape, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: Function


class AnswerMessage(_Shape, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null where the answer consists of calls."""
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


def message(text: str, deltas: Sequence[messages.Delta]) -> AnswerMessage:
    """A whole message. `deltas`: what the model's parsers made of the answer; none: its text is the content."""
    if not deltas:
        return AnswerMessage(content=text)
    calls = _calls([call for delta in deltas for call in delta.tool_calls])
    content = "".join(delta.content for delta in deltas)
    return AnswerMessage(
        content=content or (None if calls else ""),
        reasoning="".join(delta.reasoning for delta in deltas) or UNSET,
        tool_calls=calls or UNSET,
    )


def _calls(deltas: Sequence[CallDelta]) -> tuple[ToolCall, ...]:
    """Whole calls, of their pieces in order."""
    first: dict[int, CallDelta] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        first.setdefault(delta.index, delta)
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return tuple(
        ToolCall(id=call.id, function=Function(name=call.name, arguments=arguments[index]))
        for index, call in first.items()
    )


class ChatChoice(_Shape, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(_Shape, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix seconds: when the broker stored the request."""
    model: str
    choices: tuple[ChatChoice, ...]
    usage: Usage


class FunctionDelta(_Shape, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(_Shape, frozen=True, kw_only=True):
    """A piece of a call; the first has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(_Shape, frozen=True, kw_only=True):
    """What is new of a message; only that is there."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET

    def __bool__(self) -> bool:
        return self != NO_DELTA


NO_DELTA = ChatDelta()


def chat_delta(text: str, deltas: Sequence[messages.Delta]) -> ChatDelta:
    """What some output adds to a message; the arguments as for `message`."""
    if not deltas:
        return ChatDelta(content=text or UNSET)
    return ChatDelta(
        content="".join(delta.content for delta in deltas) or UNSET,
        reasoning="".join(delta.reasoning for delta in deltas) or UNSET,
        tool_calls=tuple(_call_delta(call) for delta in deltas for call in delta.tool_calls) or UNSET,
    )


def _call_delta(call: CallDelta) -> ToolCallDelta:
    function = FunctionDelta(name=call.name or UNSET, arguments=call.arguments)
    return ToolCallDelta(
        index=call.index, id=call.id or UNSET, type="function" if call.id else UNSET, function=function
    )


class ChatChunkChoice(_Shape, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(_Shape, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    """Where it was asked for: null but in the last chunk, which has no choices."""


# ---- completions


class CompletionChoice(_Shape, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(_Shape, frozen=True, kw_only=True):
    """A whole answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class Unfinished(_Shape, frozen=True, kw_only=True):
    """Of an answer that is asked for by its id before it has ended."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    model: str
    status: Literal["queued", "in_progress"]
    choices: tuple[()] = ()


class Deleted(_Shape, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.deleted", "text_completion.deleted"]
    deleted: Literal[True] = True


def total(usages: Sequence[Usage]) -> Usage:
    """The usage of several choices of one prompt, which counts once."""
    prompt = max(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


# ---- models and errors


class ModelCard(_Shape, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "pdq"
    max_model_len: int
    """Context in tokens: prompt and answer together."""


class ModelList(_Shape, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


class ErrorDetail(_Shape, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str


class ErrorAnswer(_Shape, frozen=True, kw_only=True):
    error: ErrorDetail
