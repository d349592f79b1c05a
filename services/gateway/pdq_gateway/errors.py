"""How an error is answered: a code's status and OpenAI's `type`, and what tells a client when to try again.

status  codes
400     what is wrong with the request itself (`pdq.api.refusals`)
404     unknown_model, not_found: a path, a model or an answer that is not there
405     method_not_allowed
408     request_timeout: the body did not come
409     duplicate_id: an idempotency key that was used for another body
413     payload_too_large
415     unsupported_media_type
429     queue_full, log_full: no room for now; with Retry-After
499     cancelled, by somebody else than its own client. nginx's status: clients try a 409 or a 5xx again
500     anything else that the request ended with, or a fault of the gateway's own
503     unavailable, not_stored: no broker, router or engine answers; with Retry-After
504     deadline_exceeded

OpenAI's clients try 409 and 5xx again by themselves. Where that would bring the same answer, or make the work twice,
`x-should-retry: false` tells them not to.
"""

from __future__ import annotations

import math
from typing import get_args

import msgspec
from pdq.api.answers import ErrorAnswer, ErrorDetail
from pdq.api.refusals import Code
from pdq.errors import PdqError, QueueFull
from pdq.messages import ErrorInfo

STATUS: dict[str, int] = {
    **dict.fromkeys(get_args(Code), 400),
    "invalid_request": 400,
    "invalid_text": 400,
    "unknown_model": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "duplicate_id": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "queue_full": 429,
    "log_full": 429,
    "cancelled": 499,
    "unavailable": 503,
    "not_stored": 503,
    "deadline_exceeded": 504,
}
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
    info = error.info if isinstance(error, Failed) else _info(error)
    status = STATUS.get(info.code, 500)
    detail = ErrorDetail(message=info.message, type=_type(status), param=info.param, code=info.code)
    return Refusal(status, ErrorAnswer(error=detail), _headers(status, info.retry_after_s))


def _info(error: PdqError) -> ErrorInfo:
    hint = error.retry_after_s if isinstance(error, QueueFull) else 0.0
    return ErrorInfo(code=error.code, message=str(error), param=getattr(error, "param", None), retry_after_s=hint)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _headers(status: int, retry_after_s: float) -> tuple[tuple[bytes, bytes], ...]:
    if status in FOR_NOW:
        return ((b"retry-after", str(math.ceil(retry_after_s or RETRY_AFTER_S)).encode()),)
    return ((b"x-should-retry", b"false"),) if status in FINAL else ()
