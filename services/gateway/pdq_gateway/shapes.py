"""The two shapes of an answer: chat completions and completions. Pure: the same log gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from pdq.api.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    Unfinished,
    chat_delta,
    chat_logprobs,
    completion_logprobs,
    message,
)
from pdq.api.body import ChatBody, CompletionBody
from pdq.log import Piece
from pdq.messages import FinishReason, TokenLogprob, Usage

from pdq_gateway.progress import Choice, Step, deltas_of

encode = msgspec.json.Encoder().encode


class Head(msgspec.Struct, frozen=True):
    """What stands in an answer and in each of its chunks."""

    id: str
    created: int
    model: str
    include_usage: bool = False
    """Each chunk has a `usage`: null, but for the last."""

    @property
    def no_usage(self) -> UnsetType | None:
        return None if self.include_usage else UNSET


class Shape(Protocol):
    """How an answer is written. Chunks are None where a step has nothing to show."""

    @property
    def prefix(self) -> str:
        """Of the answer's id."""

    @property
    def body(self) -> type[ChatBody] | type[CompletionBody]: ...

    def chunk(self, head: Head, index: int, step: Step) -> bytes | None:
        """What a step adds to a choice."""

    def usage(self, head: Head, usage: Usage) -> bytes:
        """The last chunk."""

    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The answer of choices that have finished."""

    def unfinished(self, head: Head, started: bool) -> bytes:
        """In the place of an answer that has not ended."""


class ChatShape:
    prefix = "chatcmpl"
    body = ChatBody

    def chunk(self, head: Head, index: int, step: Step) -> bytes | None:
        delta = delta_of(step.pieces)
        if step.first:
            # No sooner: what measures a first token takes the first chunk for it.
            delta = replace(delta, role="assistant", content=delta.content or "")
        logprobs = chat_logprobs(joined_logprobs(step.pieces))
        finish_reason = _reason(step)
        if not delta and logprobs is None and finish_reason is None:
            return None
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return encode(
            ChatChunk(id=head.id, created=head.created, model=head.model, choices=(choice,), usage=head.no_usage)
        )

    def usage(self, head: Head, usage: Usage) -> bytes:
        return encode(ChatChunk(id=head.id, created=head.created, model=head.model, choices=(), usage=usage))

    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage) -> bytes:
        made = tuple(
            ChatChoice(
                index=choice.index,
                message=message(choice.transcript.text, choice.deltas),
                logprobs=chat_logprobs(choice.logprobs),
                finish_reason=_reason_of(choice),
            )
            for choice in choices
        )
        return encode(ChatCompletion(id=head.id, created=head.created, model=head.model, choices=made, usage=usage))

    def unfinished(self, head: Head, started: bool) -> bytes:
        return encode(_unfinished(head, "chat.completion", started))


class CompletionShape:
    prefix = "cmpl"
    body = CompletionBody

    def chunk(self, head: Head, index: int, step: Step) -> bytes | None:
        text = "".join(piece.text for piece in step.pieces)
        logprobs = completion_logprobs(joined_logprobs(step.pieces), step.offset)
        finish_reason = _reason(step)
        if not text and logprobs is None and finish_reason is None:
            return None
        choice = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason)
        return encode(
            Completion(id=head.id, created=head.created, model=head.model, choices=(choice,), usage=head.no_usage)
        )

    def usage(self, head: Head, usage: Usage) -> bytes:
        return encode(Completion(id=head.id, created=head.created, model=head.model, choices=(), usage=usage))

    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage) -> bytes:
        made = tuple(
            CompletionChoice(
                index=choice.index,
                text=choice.transcript.text,
                logprobs=completion_logprobs(choice.logprobs, 0),
                finish_reason=_reason_of(choice),
            )
            for choice in choices
        )
        return encode(Completion(id=head.id, created=head.created, model=head.model, choices=made, usage=usage))

    def unfinished(self, head: Head, started: bool) -> bytes:
        return encode(_unfinished(head, "text_completion", started))


CHAT, COMPLETION = ChatShape(), CompletionShape()


def delta_of(pieces: Sequence[Piece]) -> ChatDelta:
    """What some output of the log adds to a chat's message; false where nothing of it can be seen."""
    return chat_delta("".join(piece.text for piece in pieces), deltas_of(pieces))


def joined_logprobs(pieces: Sequence[Piece]) -> list[TokenLogprob] | None:
    return [entry for piece in pieces for entry in piece.logprobs or ()] or None


def _reason(step: Step) -> FinishReason | None:
    return cast(FinishReason, step.finish_reason) if step.finish_reason else None


def _reason_of(choice: Choice) -> Any:
    return choice.state.finish_reason if choice.state is not None else None


def _unfinished(head: Head, kind: Any, started: bool) -> Unfinished:
    status: Any = "in_progress" if started else "queued"
    return Unfinished(id=head.id, object=kind, created=head.created, model=head.model, status=status)
