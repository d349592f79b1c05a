"""How an error is answered: its status (`pdq.api.statuses`), and what tells a client when to try again.

OpenAI's clients try 409 and 5xx again by themselves. Where that would bring the same answer, or make the work twice,
`x-should-retry: false` tells them not to.
"""

from __future__ import annotations

import math

import msgspec
from pdq.api.answers import ErrorAnswer
from pdq.api.statuses import detail_of, status_of
from pdq.errors import PdqError, QueueFull
from pdq.messages import ErrorInfo

RETRY_AFTER_S = 1.0
"""Where nothing better is known."""
FOR_NOW = frozenset({429, 503})
FINAL = frozenset({409, 500, 504})


class Failed(PdqError):
    """An answer that is an error; `info` as the log has it, or as it would."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info
        self.code = info.code


def failed(code: str, message: str, param: str | None = None) -> Failed:
    return Failed(ErrorInfo(code=code, message=message, param=param))


class Refusal(msgspec.Struct, frozen=True):
    """An error as it goes out."""

    status: int
    answer: ErrorAnswer
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(self.answer)


def refusal(error: PdqError) -> Refusal:
    info = info_of(error)
    status = status_of(info.code)
    return Refusal(status, ErrorAnswer(error=detail_of(info)), _headers(status, info.retry_after_s))


def info_of(error: PdqError) -> ErrorInfo:
    if isinstance(error, Failed):
        return error.info
    hint = error.retry_after_s if isinstance(error, QueueFull) else 0.0
    return ErrorInfo(code=error.code, message=str(error), param=getattr(error, "param", None), retry_after_s=hint)


def _headers(status: int, retry_after_s: float) -> tuple[tuple[bytes, bytes], ...]:
    if status in FOR_NOW:
        return ((b"retry-after", str(math.ceil(retry_after_s or RETRY_AFTER_S)).encode()),)
    if status == 401:
        return ((b"www-authenticate", b"Bearer"),)
    return ((b"x-should-retry", b"false"),) if status in FINAL else ()
