"""An answer as it comes in: its text, when it came, how it ended."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from typing import Any

import msgspec

from pdq.errors import PdqError, QueueFull, Rejected, Unavailable
from pdq.log import Transcript
from pdq.messages import ErrorInfo, Event, KvReport, State

REFUSALS = frozenset({"queue_full", "log_full"})


class Ended(PdqError):
    """A request that ended otherwise than with its whole answer."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Answer:
    """Collects the events of one request. `body`: what was submitted, to tell it from another under its name."""

    def __init__(self, request: str, body: bytes | None = None) -> None:
        self.request = request
        self.trace_id = ""
        self.began = time.monotonic()
        self._digest = hashlib.sha256(body).hexdigest() if body is not None else ""
        self._transcript = Transcript()
        self._arrivals: list[tuple[float, int]] = []
        """Per piece: when it came, and its number of tokens."""
        self._ended_at = 0.0

    @property
    def text(self) -> str:
        return self._transcript.text

    @property
    def state(self) -> State | None:
        return self._transcript.state

    @property
    def complete(self) -> bool:
        return self._transcript.complete()

    def take(self, event: Event) -> str:
        """The text that became readable. Raises Rejected when this is the log of another request of that name."""
        state = event.state
        if self._digest and state is not None and state.digest and state.digest != self._digest:
            message = f"request id {self.request} was used for another request already"
            raise Rejected(message, code="duplicate_id", param="id")
        pieces = self._transcript.feed(event)
        now = time.monotonic()
        self._arrivals += [(now, len(piece.ids)) for piece in pieces]
        if self._transcript.ended:
            self._ended_at = now
        return "".join(piece.text for piece in pieces)

    def replace(self, events: list[Event]) -> str:
        """Start over from the whole log; returns the text that was missing."""
        whole, known = Transcript(), self.text
        for event in events:
            whole.feed(event)
        self._transcript = whole
        return whole.text.removeprefix(known) if whole.text.startswith(known) else ""

    def error(self) -> PdqError | None:
        """What it ended with, unless that is the whole answer."""
        state = self.state
        if state is None or not state.ended:
            return Unavailable(f"request {self.request} has not ended")
        if state.event == "finished":
            return None if self.complete else Ended("the answer that arrived is not the stored one", "incomplete")
        if state.event == "cancelled":
            return Ended(f"request {self.request} was cancelled by {state.cause or 'someone'}", "cancelled")
        info = state.error or ErrorInfo(code=state.event, message=f"request {self.request}: {state.event}")
        return _raised(info, routed=bool(state.order))

    def result(self) -> dict[str, Any]:
        """The one object of `--json`."""
        state = self.state
        found: dict[str, Any] = {"id": self.request, "text": self.text, "trace_id": self._trace()}
        if state is not None:
            found |= {
                "finish_reason": state.finish_reason or None,
                "usage": msgspec.to_builtins(state.usage),
                "route": {"order": state.order or None, "reason": state.reason or None},
                "kv": msgspec.to_builtins(self.kv()),
            }
        return found | {"timings_ms": self.timings_ms()}

    def kv(self) -> KvReport:
        """What decode was promised, loaded and had; before its end, what it was promised."""
        state = self.state
        if state is not None and state.kv is not None:
            return state.kv
        return KvReport(promised_tokens=state.promise.tokens if state is not None and state.promise else 0)

    def timings_ms(self) -> dict[str, float]:
        """By stage, as the log has them; `ttft` and `total` as whoever submitted it saw them."""
        state = self.state
        made = dict(state.timings_ms) if state is not None else {}
        if self._digest and self._arrivals:
            made["ttft"] = (self._arrivals[0][0] - self.began) * 1e3
        if self._digest and self._ended_at:
            made["total"] = (self._ended_at - self.began) * 1e3
        elif state is not None and state.ended and state.submitted:
            made["total"] = (state.at - state.submitted) * 1e3
        return {name: round(ms, 1) for name, ms in made.items()}

    def gaps_ms(self) -> list[float]:
        """Times between tokens as they were seen here: tokens that came together share the time since the last."""
        pairs = itertools.pairwise(self._arrivals)
        return [(at - before) * 1e3 / count for (before, _), (at, count) in pairs for _ in range(count)]

    def _trace(self) -> str | None:
        return self.trace_id or (self.state.trace if self.state is not None else "") or None


def _raised(info: ErrorInfo, routed: bool) -> PdqError:
    """The error that a request ended with: what is refused before it is routed is the request's own fault."""
    if info.code in REFUSALS:
        return QueueFull(info.message)
    if not routed and info.code not in ("internal_error", "deadline_exceeded"):
        return Rejected(info.message, code=info.code, param=info.param)
    return Ended(info.message, info.code, info.param)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]
