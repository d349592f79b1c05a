"""Exit codes of the `pdq` command: what a script can tell apart."""

from __future__ import annotations

from pdq.errors import Misconfigured, PdqError, QueueFull, Rejected, Unavailable

OK = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
REFUSED = 4
EXPIRED = 5
CANCELLED = 6
ALREADY_RUNNING = 7
UNHEALTHY = 8
INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143

HELP = """Exit codes: 0 done; 1 failed; 2 wrong usage, bad input, or a request that was rejected;
3 broker unreachable, or unable to store, or no stack is running; 4 refused for now
(a queue is full, a limit is reached); 5 the deadline passed; 6 cancelled; 7 a stack is running already;
8 `pdq doctor` found a fault; 130 Ctrl-C; 141 the output was closed; 143 SIGTERM."""

BY_CODE = {
    "already_running": ALREADY_RUNNING,
    "cancelled": CANCELLED,
    "deadline_exceeded": EXPIRED,
    "expired": EXPIRED,
    "incomplete": FAILED,
    "internal_error": FAILED,
    "interrupted": INTERRUPTED,
    "log_full": REFUSED,
    "queue_full": REFUSED,
    "rate_limit_exceeded": REFUSED,
    "stack_failed": FAILED,
}


def of(error: PdqError) -> int:
    """The exit code of an error: by its code where that says more than its kind."""
    if error.code in BY_CODE:
        return BY_CODE[error.code]
    if isinstance(error, Rejected | Misconfigured):
        return USAGE
    if isinstance(error, QueueFull):
        return REFUSED
    return UNREACHABLE if isinstance(error, Unavailable) else FAILED
