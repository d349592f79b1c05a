"""`out`: the tokens of one decode attempt, batched by time and size.

A second attempt of a request begins somewhere within what the log already shows (at its start, to replay
it, or where its text is clean, to go on), and compares what it computes again with what was shown before
it publishes more: two answers are never spliced.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence

from pdq import subjects
from pdq.bus import Outbox
from pdq.errors import Rejected
from pdq.log.parsed import Parsed
from pdq.log.transcript import Transcript
from pdq.messages import Delta, Output, TokenLogprob, encode_json, pack_ids

BATCH_TOKENS = 16
BATCH_S = 0.025
FLUSH_TIMEOUT_S = 15.0


class OutputWriter:
    """Writes one attempt's tokens. `shown` is what earlier attempts published, read up to this claim;
    `begin` is where the attempt begins in it: (tokens, characters)."""

    def __init__(
        self,
        outbox: Outbox,
        tenant: str,
        request: str,
        attempt: int,
        shown: Transcript,
        begin: tuple[int, int] = (0, 0),
    ) -> None:
        self._channel = outbox.channel(subjects.out(tenant, request))
        self._attempt = attempt
        self._shown = shown
        self.ids: list[int] = shown.ids[: begin[0]]
        """All ids of the answer: those gone on from, and those computed (again) by this attempt."""
        self._text = shown.text[: begin[1]]
        self._logprobs: list[TokenLogprob] = shown.logprobs[: begin[0]]
        self._compared = len(self.ids)
        self._held = False
        self._parsed: Parsed | None = None
        self._published_parsed = shown.parsed or Parsed()
        self._unpublished: Delta | None = None
        """What the answer as parsed has beyond what was published."""
        self._published_ids = len(shown.ids)
        self._published_text = len(shown.text)
        self._published_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def write(
        self,
        ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprob] | None,
        held: bool = False,
        delta: Delta | None = None,
    ) -> None:
        """Take the next tokens. Raises Rejected (`diverged`) where they differ from what was shown.

        delta: what they add to the answer as parsed, counted from the answer's start: those of the tokens that the
        attempt goes on from come with its first ones.
        """
        self._held = held
        if delta is not None:
            self._parsed = self._parsed or Parsed()
            self._parsed.add(delta)
        self.ids.extend(ids)
        self._text += text
        self._logprobs.extend(logprobs or ())
        self._compare()
        self._compare_parsed()
        waiting = len(self.ids) - self._published_ids
        if waiting <= 0:
            return
        age = time.monotonic() - self._published_at
        if waiting >= BATCH_TOKENS or age >= BATCH_S:
            await self._publish()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S - age, self._due)

    async def flush(self) -> None:
        """Publish what is left and wait until the stream has stored it all. Raises Unavailable or QueueFull."""
        if self._publishing is not None:
            await self._publishing
        await self._publish()
        await self._channel.flush(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        self._cancel_timer()
        self._channel.close()

    def check_end(self) -> None:
        """At the end of an answer: raise Rejected (`diverged`) when more was shown than was computed."""
        if len(self.ids) < len(self._shown.ids):
            raise self._diverged(len(self.ids))

    @property
    def num_tokens(self) -> int:
        """Tokens readers have or will have: computed here, or shown before."""
        return max(len(self.ids), len(self._shown.ids))

    def digest(self) -> str:
        """SHA-256 over the ids readers have, packed, hex."""
        ids = self.ids if len(self.ids) >= len(self._shown.ids) else self._shown.ids
        return hashlib.sha256(pack_ids(ids)).hexdigest()

    def _compare(self) -> None:
        """Compare what is new with what was shown there; where they differ, nothing from there on is kept."""
        for place in range(self._compared, min(len(self.ids), len(self._shown.ids))):
            if self.ids[place] != self._shown.ids[place]:
                del self.ids[place:]
                raise self._diverged(place)
            self._compared = place + 1

    def _compare_parsed(self) -> None:
        """Another reading of the same tokens (by another version of a parser) is another answer too."""
        if self._parsed is not None:
            try:
                self._unpublished = self._parsed.since(self._published_parsed)
            except ValueError as exc:
                raise self._diverged(len(self.ids)) from exc

    def _diverged(self, place: int) -> Rejected:
        return Rejected(
            f"a second attempt computed another answer from token {place} on; the first one was shown already",
            code="diverged",
        )

    def _due(self) -> None:
        self._timer = None
        self._publishing = asyncio.ensure_future(self._publish())

    async def _publish(self) -> None:
        self._cancel_timer()
        start, end = self._published_ids, len(self.ids)
        text = self._text[self._published_text :]
        if end <= start:
            return
        delta = self._unpublished
        # Taken before anything is awaited, so that no other batch can take the same tokens.
        self._published_ids, self._published_text = end, max(self._published_text, len(self._text))
        self._published_at = time.monotonic()
        if delta is not None:
            self._published_parsed.add(delta)
            self._unpublished = Delta()
        logprobs = tuple(self._logprobs[start:end]) or None
        record = Output.of(self._attempt, start, self.ids[start:end], text, logprobs, self._held, delta)
        await self._channel.send(encode_json(record))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
