"""One line's request, from its submit to its result: tried again while it is refused for now, never run twice.

A request's id follows from the batch, the line and what it asks for. So a line that is submitted again, after an error
in doubt or by another run, is the same request, and its answer is read from the log. What the router has refused for
now has ended under its id; the next attempt has another.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import NamedTuple

from pdq.batch.items import Item
from pdq.batch.records import Mark, Record, answer_of, failed, succeeded
from pdq.client import Client, idempotent_id
from pdq.errors import PdqError, Retryable, Unavailable
from pdq.log import Transcript
from pdq.messages import Delta, ErrorInfo, Event
from pdq.settings import Models

SUBMIT_TIMEOUT_S = 5.0
GRACE_S = 30.0
"""An end may come so much later than the deadline."""
BACKOFF_S, MOST_BACKOFF_S, JITTER = 0.5, 30.0, 0.25
LEAST_DEADLINE_S = 1.0


class Options(NamedTuple):
    """`timeout_s`: of a line, with all its attempts. `known`: an earlier run may have submitted some."""

    batch: str
    priority: str
    timeout_s: float
    known: bool


class Asker:
    """`running`: by line, the request that was submitted last, until the line has its result."""

    def __init__(self, client: Client, models: Models | None, options: Options) -> None:
        self.running: dict[int, str] = {}
        self._client = client
        self._models = models
        self._options = options

    async def ask(self, item: Item) -> Record:
        """The result of a line, whatever becomes of it."""
        record = await self._ask(item)
        self.running.pop(item.number, None)
        return record

    async def _ask(self, item: Item) -> Record:
        mark = Mark.of(self._options.batch, item.number, item.digest)
        give_up = time.monotonic() + self._options.timeout_s
        attempts = refusals = 0
        while True:
            request = idempotent_id(f"{mark} {item.digest.hex()} {refusals}")
            attempts += 1
            try:
                heard = await self._once(request, item, give_up, in_doubt=attempts > 1)
                if (error := heard.error()) is None:
                    answer = answer_of(item, request, heard.transcript, heard.deltas, self._public(item))
                    return succeeded(mark, item, request, answer, attempts)
                # An end: under this id there will be no other.
                refusals += 1
                again = bool(error.retry_after_s)
            except PdqError as exc:
                error, again = _info(exc), isinstance(exc, Retryable)
            wait_s = _backoff_s(attempts, error.retry_after_s)
            if not again or time.monotonic() + wait_s > give_up:
                return failed(mark, item.custom_id, error, request, attempts)
            await asyncio.sleep(wait_s)

    async def _once(self, request: str, item: Item, give_up: float, *, in_doubt: bool) -> Heard:
        """Submit, and hear it to its end. Raises Rejected, QueueFull or Unavailable."""
        heard = Heard(request)
        async with self._client.follow(request, catch_up=self._options.known or in_doubt) as follower:
            left_s = max(LEAST_DEADLINE_S, give_up - time.monotonic())
            self.running[item.number] = request
            await self._client.submit(
                item.body,
                model=item.model,
                request=request,
                deadline_s=round(left_s, 3),
                priority=self._options.priority,
                timeout_s=min(SUBMIT_TIMEOUT_S, left_s),
            )
            async for event in follower.events(left_s + GRACE_S):
                heard.take(event)
        if not heard.transcript.complete():
            # The last live copies may be lost, with nothing after them that would show it.
            heard = await self._read(request)
        return heard

    async def _read(self, request: str) -> Heard:
        heard, more = Heard(request), True
        while more:
            page = await self._client.read(request, after=heard.transcript.seq, limit=1_000)
            for event in page.events:
                heard.take(event)
            more = page.more
        return heard

    def _public(self, item: Item) -> str:
        known = self._models.find(item.model) if self._models is not None else None
        return known.id if known is not None else item.model


class Heard:
    """What came of one request."""

    def __init__(self, request: str) -> None:
        self.transcript = Transcript()
        self.deltas: list[Delta] = []
        self._request = request

    def take(self, event: Event) -> None:
        pieces = self.transcript.feed(event)
        self.deltas += [piece.delta for piece in pieces if piece.delta is not None]

    def error(self) -> ErrorInfo | None:
        """What it ended with, unless that is the whole answer."""
        state = self.transcript.state
        if state is None or not state.ended:
            raise Unavailable(f"request {self._request} has not ended")
        if state.event == "finished":
            return None if self.transcript.complete() else _incomplete()
        if state.event == "cancelled":
            return ErrorInfo(code="cancelled", message=f"the request was cancelled by {state.cause or 'someone'}")
        return state.error or ErrorInfo(code="internal_error", message=f"the request {state.event}")


def _incomplete() -> ErrorInfo:
    return ErrorInfo(code="internal_error", message="the answer in the log is not whole")


def _info(exc: PdqError) -> ErrorInfo:
    hint, param = getattr(exc, "retry_after_s", 0.0), getattr(exc, "param", None)
    return ErrorInfo(code=exc.code, message=str(exc), param=param, retry_after_s=hint)


def _backoff_s(attempts: int, hint_s: float) -> float:
    """Seconds until the next attempt: at least as many as the refusal asks for, and not all lines at one time."""
    wait_s = max(hint_s, min(MOST_BACKOFF_S, BACKOFF_S * 2.0 ** min(attempts - 1, 10)))
    return wait_s * (1 + JITTER * random.random())
