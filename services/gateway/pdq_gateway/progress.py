"""How far an answer is: each choice's transcript, what of it is new, and how it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from pdq.api.answers import total
from pdq.log import Piece, Transcript
from pdq.messages import Delta, ErrorInfo, Event, State, TokenLogprob, Usage

from pdq_gateway.errors import Failed, failed


class Step(msgspec.Struct, frozen=True):
    """What one event adds to a choice. `offset`: characters of the tokens before, as their log probabilities tell."""

    seq: int
    pieces: tuple[Piece, ...] = ()
    offset: int = 0
    finish_reason: str = ""

    @property
    def first(self) -> bool:
        """Whether the answer begins with it."""
        return bool(self.pieces) and self.pieces[0].index == 0


class Choice:
    """One pdq request. `body`: what was submitted as it, to tell it from another of its name; None: it is only read."""

    def __init__(self, index: int, request: str, body: bytes | None = None) -> None:
        self.index = index
        self.request = request
        self.seq = 0
        self.offset = 0
        self.submitted = False
        """By this gateway; it may still be another's that had the name first."""
        self.deltas: list[Delta] = []
        """Where the model's parsers read the answer: all that they made of it."""
        self.transcript = Transcript()
        self._digest = hashlib.sha256(body).hexdigest() if body is not None else ""

    @property
    def state(self) -> State | None:
        return self.transcript.state

    @property
    def opened(self) -> bool:
        """Whether it was routed, so that its answer may begin."""
        return self.state is not None and bool(self.state.order)

    @property
    def ended(self) -> bool:
        return self.transcript.ended

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.transcript.logprobs or None

    def mine(self, named: bool) -> bool:
        """Whether it may be cancelled for its client. `named`: by a key, so that the name alone proves nothing."""
        return not self.ended and (self.state is not None if named else self.submitted)

    def take(self, event: Event) -> Step:
        """Raises Failed when the request ended otherwise than with its whole answer, or is another one's."""
        state, offset = event.state, self.offset
        self.check_own(state)
        pieces = self.transcript.feed(event)
        self.seq = event.seq
        self.deltas += deltas_of(pieces)
        self.offset += sum(len(entry.token) for piece in pieces for entry in piece.logprobs or ())
        if state is None:
            return Step(event.seq, pieces=tuple(pieces), offset=offset)
        if state.ended:
            self._check_end(state)
        return Step(event.seq, finish_reason=state.finish_reason)

    def check_own(self, state: State | None) -> None:
        """Raise Failed when a state is that of another body under this name."""
        if self._digest and state is not None and state.digest and state.digest != self._digest:
            message = "this Idempotency-Key was used for another body"
            raise failed("duplicate_id", message, "Idempotency-Key")

    def _check_end(self, state: State) -> None:
        if state.event == "cancelled":
            raise failed("cancelled", "the request was cancelled")
        if state.event != "finished":
            raise Failed(state.error or ErrorInfo(code=state.event, message=f"the request {state.event}"))
        if not self.transcript.complete():
            raise failed("internal_error", "the answer in the log is not whole")


def deltas_of(pieces: Sequence[Piece]) -> list[Delta]:
    return [piece.delta for piece in pieces if piece.delta is not None]


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Of choices that have finished."""
    return total([choice.state.usage for choice in choices if choice.state is not None and choice.state.usage])
