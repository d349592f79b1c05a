"""What a request's events amount to: the tokens that count, and how it ended. Pure; no I/O.

Used by every reader (client, gateway) and by recovery alike, so that both see the same answer:
- events come in stream order; records of an attempt stored after a newer decode claim do not count;
- tokens go by index: what is there already is dropped, what is ahead is held until the gap is filled;
- the terminal event tells how many tokens there are and their digest, and the reader checks both.
"""

from __future__ import annotations

import hashlib

import msgspec

from pdq.log.parsed import Parsed
from pdq.messages import Delta, Event, Output, State, TokenLogprob, pack_ids


class Piece(msgspec.Struct, frozen=True):
    """Some new tokens of the answer, in order."""

    index: int
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    delta: Delta | None = None
    """As the record has it: what it adds to an answer that the model's parsers read."""


class Transcript:
    """Feed it events; it returns the pieces that became readable."""

    def __init__(self) -> None:
        self.seq = 0
        self.attempt = 0
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.parsed: Parsed | None = None
        """The answer as the model's parsers see it, where they read it."""
        self.state: State | None = None
        self.clean = (0, 0)
        """Tokens, and characters of their text, up to the last place where no text was held back."""
        self._ahead: dict[int, Output] = {}

    @property
    def ended(self) -> bool:
        return self.state is not None and self.state.ended

    def feed(self, event: Event) -> list[Piece]:
        """Take one event; one that was seen already (by sequence) changes nothing."""
        if event.seq <= self.seq:
            return []
        self.seq = event.seq
        if event.state is not None:
            self._take_state(event.state)
        elif event.out is not None and event.out.attempt == self.attempt:
            self._ahead.setdefault(event.out.index, event.out)
        return self._readable()

    def digest(self, num_tokens: int | None = None) -> str:
        """SHA-256 over the first token ids (default: all so far), packed, hex."""
        return hashlib.sha256(pack_ids(self.ids[:num_tokens])).hexdigest()

    def complete(self) -> bool:
        """Whether the request ended and every token that its end names is here, and is the right one.

        Ends that carry no answer (`failed` before decode, say) name no tokens; then there is nothing to
        check. An end written in a dead worker's place names those stored by then: more may have come.
        """
        state = self.state
        if state is None or not state.ended:
            return False
        if not state.output_digest:
            return True
        enough = len(self.ids) == state.num_tokens if state.event == "finished" else len(self.ids) >= state.num_tokens
        return enough and state.output_digest == self.digest(state.num_tokens)

    def _take_state(self, state: State) -> None:
        self.state = state
        if state.decode.attempt > self.attempt:
            self.attempt = state.decode.attempt
            # What an older attempt had stored ahead of a gap was never shown, and now never counts.
            self._ahead.clear()

    def _readable(self) -> list[Piece]:
        pieces = []
        while (out := self._ahead.pop(len(self.ids), None)) is not None:
            piece = Piece(len(self.ids), tuple(out.token_ids()), out.text, out.logprobs, out.delta)
            self.ids.extend(piece.ids)
            self.text += piece.text
            self.logprobs.extend(piece.logprobs or ())
            if out.delta is not None:
                self.parsed = self.parsed or Parsed()
                self.parsed.add(out.delta)
            if not out.held:
                self.clean = (len(self.ids), len(self.text))
            pieces.append(piece)
        return pieces
