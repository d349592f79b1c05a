"""What a handler is given, and what it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec

from pdq.engines.base import Phase, Tokens
from pdq.messages import FinishReason, Job, KvReport, Promise


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill is done: what decode can load now."""

    promise: Promise
    phases: tuple[Phase, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Decode is done: all tokens were emitted, and this is how they ended."""

    finish_reason: FinishReason
    kv: KvReport
    phases: tuple[Phase, ...] = ()


Outcome = Handoff | Answer


Delegate = Callable[[Callable[[], Awaitable[int]]], Awaitable[Promise | None]]


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One claim of a stage on a request, as its handler sees it."""

    number: int
    traceparent: str
    emit: Callable[[Tokens], Awaitable[None]]
    """Publish some output tokens (decode only)."""
    delegate: Delegate | None = None
    """decode-first: have the prompt prefilled elsewhere, unless the function given finds that no token of its whole
    chunks is missing here. Returns what can be loaded then; None: compute it here."""
    shown: tuple[int, ...] = ()
    """Output tokens of earlier attempts, to go on after (decode only)."""


J = TypeVar("J", bound=Job, contravariant=True)


class Handler(Protocol[J]):
    """A service's own work. Raises Rejected when the job can never run, anything else when it may be retried."""

    async def handle(self, job: J, attempt: Attempt) -> Outcome: ...
