"""Every error pdq raises, named by what the receiver does about it.

PdqError
├── Rejected            permanent: the request itself is wrong, or must not run; never retried
│   ├── NotDecodable    a message whose body is not what its subject promises
│   └── Unauthorized    no API key, or one that is not valid (any more)
├── Retryable           the same work may succeed later or elsewhere
│   ├── Unavailable     the broker, an engine or a tier does not answer in time
│   │   └── NotStored   the broker answers, but does not store: its disk is full, say
│   ├── NewerVersion    a message of a newer version than this build reads; another build reads it
│   ├── QueueFull       a queue refuses more work for now
│   └── OverLimit       a tenant is at one of its limits for now
├── WrongSequence       a compare-and-set write that lost: read again, then decide
├── Interrupted         the work was told to stop (cancel, deadline, a newer claim, shutdown)
└── Misconfigured       a process cannot start like this; the message says what to change
"""

from __future__ import annotations


class PdqError(Exception):
    """Base of all errors of this library. `code` is stable and machine-readable."""

    code = "internal_error"


class Rejected(PdqError):
    """A request that can never succeed.

    `param` names the offending field in OpenAI's style (`messages[0].role`), or is None.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class NotDecodable(Rejected):
    """A message whose bytes are not what its subject promises."""

    def __init__(self, message: str, *, code: str = "not_decodable", param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)


class Unauthorized(Rejected):
    """No API key, or one that is not valid (any more). The message never quotes the key."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")


class Retryable(PdqError):
    """Work that may succeed when tried again, here or by another worker."""

    code = "retryable"


class Unavailable(Retryable):
    """Something pdq depends on did not answer within its bound."""

    code = "unavailable"


class NotStored(Unavailable):
    """The broker answers, but has not acknowledged a durable publish: its disk is full or fails, or no stream
    takes it. The message is in doubt."""

    code = "not_stored"


class NewerVersion(Retryable):
    """A message that only a newer build can read: left alone, or given back, so that one does (docs/upgrades.md)."""

    code = "newer_version"


UNREADABLE = (NotDecodable, NewerVersion)
"""What decoding a message raises."""


class QueueFull(Retryable):
    """A queue is at its limit. `per_subject`: the limit of this one subject, not of the whole stream;
    `retry_after_s` is a hint, never a promise."""

    code = "queue_full"

    def __init__(self, message: str, *, per_subject: bool = False, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.per_subject = per_subject
        self.retry_after_s = retry_after_s


class OverLimit(Retryable):
    """A tenant is at one of its limits for now. `limit`: its name, `value`: what it is set to; `retry_after_s`: when
    the same request would be let in if nothing else came, or a hint where nobody can know."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, limit: str, value: int, retry_after_s: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.value = value
        self.retry_after_s = retry_after_s


class WrongSequence(PdqError):
    """A compare-and-set publish that expected another last sequence."""

    code = "wrong_sequence"


class Interrupted(PdqError):
    """Running work was told to stop. `cause`: cancelled, expired, fenced, ended or drain."""

    code = "interrupted"

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Misconfigured(PdqError):
    """A process cannot start like this; the message says what to change."""

    code = "misconfigured"
