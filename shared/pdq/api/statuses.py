"""An error as OpenAI's clients read it: the HTTP status of a code, and the `error` object.

status  codes
400     what is wrong with the request itself (`pdq.api.refusals`)
401     invalid_api_key
404     unknown_model, not_found: a path, a model or an answer that is not there
405     method_not_allowed
408     request_timeout: the body did not come
409     duplicate_id: a name or an idempotency key that was used for another body
413     payload_too_large
415     unsupported_media_type
429     queue_full, log_full: no room for now; rate_limit_exceeded: a tenant's limit
431     headers_too_large: the line and the headers of a request
499     cancelled, by somebody else than its own client. nginx's status: clients try a 409 or a 5xx again
500     anything else that the request ended with, or a fault of the server's own
503     unavailable, not_stored: no broker, router or engine answers; newer_version: this gateway is too old for it
504     deadline_exceeded
"""

from __future__ import annotations

from typing import get_args

from pdq.api.answers import ErrorDetail
from pdq.api.refusals import Code
from pdq.messages import ErrorInfo

STATUS: dict[str, int] = {
    **dict.fromkeys(get_args(Code), 400),
    "invalid_request": 400,
    "invalid_text": 400,
    "invalid_api_key": 401,
    "unknown_model": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "duplicate_id": 409,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "queue_full": 429,
    "log_full": 429,
    "rate_limit_exceeded": 429,
    "headers_too_large": 431,
    "cancelled": 499,
    "unavailable": 503,
    "newer_version": 503,
    "not_stored": 503,
    "deadline_exceeded": 504,
}


def status_of(code: str) -> int:
    return STATUS.get(code, 500)


def detail_of(info: ErrorInfo) -> ErrorDetail:
    return ErrorDetail(message=info.message, type=_type(status_of(info.code)), param=info.param, code=info.code)


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
