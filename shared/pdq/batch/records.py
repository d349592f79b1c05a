"""A line of output: OpenAI's batch shape, in which `error` is null exactly where there is an answer.

`id` tells which line of which batch it is for, and what that asked: what a later run goes by.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pdq.api.answers import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    ErrorAnswer,
    chat_logprobs,
    completion_logprobs,
    message,
)
from pdq.api.statuses import detail_of, status_of
from pdq.batch.items import CHAT, Item
from pdq.log import Transcript
from pdq.messages import Delta, ErrorInfo

PREFIX = "batch_req_"
_ID = re.compile(rf"{PREFIX}([0-9a-f]{{16}})_(\d{{1,9}})_([0-9a-f]{{8}})\Z")
OK = 200


class Mark(NamedTuple):
    """`batch`: 16 hex digits. `check`: 32 bits of the digest of what the line asks for, never 0."""

    batch: str
    number: int
    check: int

    def __str__(self) -> str:
        return f"{PREFIX}{self.batch}_{self.number}_{self.check:08x}"

    @classmethod
    def of(cls, batch: str, number: int, digest: bytes) -> Mark:
        return cls(batch, number, int.from_bytes(digest[:4], "big") or 1)

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        found = _ID.match(text)
        return cls(found[1], int(found[2]), int(found[3], 16)) if found else None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    """The pdq request: `pdq status` takes it. Empty: nothing was submitted."""
    body: ChatCompletion | Completion | ErrorAnswer


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None
    line: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str | None
    """Null where the line has none that can be read."""
    response: Response
    error: LineError | None
    attempts: int
    """How often it was sent; a refusal for now is followed by another attempt."""


def succeeded(mark: Mark, item: Item, request: str, answer: Any, attempts: int) -> Record:
    response = Response(status_code=OK, request_id=request, body=answer)
    return Record(id=str(mark), custom_id=item.custom_id, response=response, error=None, attempts=attempts)


def failed(mark: Mark, custom_id: str | None, error: ErrorInfo, request: str = "", attempts: int = 0) -> Record:
    response = Response(status_code=status_of(error.code), request_id=request, body=ErrorAnswer(error=detail_of(error)))
    told = LineError(code=error.code, message=error.message, param=error.param, line=mark.number)
    return Record(id=str(mark), custom_id=custom_id, response=response, error=told, attempts=attempts)


def answer_of(
    item: Item, request: str, transcript: Transcript, deltas: Sequence[Delta], model: str
) -> ChatCompletion | Completion:
    """The body of a request that has finished. `deltas`: what the model's parsers made of it. `model`: by public id."""
    state: Any = transcript.state
    logprobs = transcript.logprobs or None
    head: dict[str, Any] = {"created": int(state.submitted), "model": model, "usage": state.usage}
    if item.url == CHAT:
        chat = ChatChoice(
            index=0,
            message=message(transcript.text, deltas),
            logprobs=chat_logprobs(logprobs),
            finish_reason=state.finish_reason,
        )
        return ChatCompletion(id=f"chatcmpl-{request}", choices=(chat,), **head)
    choice = CompletionChoice(
        index=0,
        text=transcript.text,
        logprobs=completion_logprobs(logprobs, 0),
        finish_reason=state.finish_reason,
    )
    return Completion(id=f"cmpl-{request}", choices=(choice,), **head)
