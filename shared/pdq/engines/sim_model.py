"""The simulated model: which token comes next, and the text that tokens make.

The state after a token is a hash of the state before it and of the token: 16 bytes, which are also that
token's KV. So a wrong or spliced KV gives another answer, as it would with a real model. The next token is a
hash of the state, and of the seed where the temperature is above 0; `top_p`, `top_k`, `min_p`, penalties and
`logit_bias` are ignored. It depends on nothing else: prompt plus first tokens, given as a prompt, goes on the
same way.

About one token in `EOS_ONE_IN` is an end token: of answers of 64 tokens a fifth ends early, of 256 two
thirds. `min_tokens` forbids end and stop tokens, and lets stop strings pass, as vLLM does. A character
begun by one token is always completed by the next ones, unless a limit cuts it (it is then U+FFFD).

Where a real model would keep to a grammar, call tools or think, it begins with a script (`sim_script`), which follows
from the request.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from pdq.bytes_tokenizer import NUM_BYTES, BytesTokenizer
from pdq.engines.base import Tokens
from pdq.engines.sim_script import Script, script_of
from pdq.messages import FinishReason, Sampling, TokenLogprob, TopLogprob

STATE_BYTES = 16
START = bytes(STATE_BYTES)
EOS_ONE_IN = 256
_DRAWS = 256
_NONE: frozenset[int] = frozenset()
_NEW_STATE = blake2b(digest_size=STATE_BYTES)
"""To copy: to make one takes half as long again."""


def advance(state: bytes, token: int) -> bytes:
    """The state after `token`: 16 bytes."""
    new = _NEW_STATE.copy()
    new.update(state + token.to_bytes(4, "little"))
    return new.digest()


class Generation:
    """One answer in the making: feed it states, it gives tokens until `finish` is set.

    `room` is the context left after the prompt, in tokens; it bounds the answer as `max_tokens` does.
    `script`: what is left of what it says whatever its states are.
    """

    def __init__(
        self,
        tokenizer: BytesTokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        room: int,
        script: Script | None = None,
    ) -> None:
        self._script = script or Script()
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limit = min(sampling.max_tokens, room)
        seed = sampling.seed.to_bytes(16, "little", signed=True) if sampling.temperature > 0 else b""
        self._seeded = blake2b(digest_size=12, key=seed)
        self._words = tokenizer.vocab_size - NUM_BYTES
        self._stops = StopStrings(sampling.stop)
        self._early = frozenset((*tokenizer.eos_token_ids, *sampling.stop_token_ids))
        """What `min_tokens` forbids."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(_open_end(tokenizer, prompt))
        self._open = self._is_open()
        """Whether a character is begun and not complete."""
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def step(self, state: bytes) -> Tokens:
        """The next token and its text, given the state after everything before it; sets `finish` on the last."""
        token = self._draw(state)
        self.num_tokens += 1
        stopped = self._stops_at(token)
        last = stopped or self.num_tokens >= self._limit
        piece = self._piece(b"" if stopped else self._tokenizer.token_bytes(token), last)
        text, matched = self._stops.push(piece, check=self.num_tokens > self._sampling.min_tokens, final=last)
        if last or matched:
            self.finish = "stop" if stopped or matched else "length"
        return Tokens(ids=(token,), text=text, logprobs=self._logprobs(state, token), held=self._holds())

    def _piece(self, added: bytes, last: bool) -> str:
        if not self._open and added.isascii():
            # As most words are; the decoder would say the same, more slowly.
            return added.decode("ascii")
        piece = self._decoder.decode(added, final=last)
        self._open = self._is_open()
        return piece

    def _holds(self) -> bool:
        return self.finish is None and (self._open or bool(self._stops.held))

    def _is_open(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _draw(self, state: bytes) -> int:
        if self.num_tokens < len(self._script.text):
            return self._script.text[self.num_tokens]
        if self._script.alone:
            return self._tokenizer.eos_token_ids[0]
        banned = self._early if self.num_tokens < self._sampling.min_tokens else _NONE
        for attempt in range(_DRAWS):
            token = self._candidate(state, attempt)
            if token not in banned:
                return token
        return next((token for token in range(self._tokenizer.vocab_size) if token not in banned), 0)

    def _candidate(self, state: bytes, attempt: int) -> int:
        drawn = self._seeded.copy()
        drawn.update(state + attempt.to_bytes(1, "little"))
        digest = drawn.digest()
        kind, value = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
        if self._open:
            return 0x80 + value % 0x40
        eos = self._tokenizer.eos_token_ids
        if kind % EOS_ONE_IN == 0:
            return eos[value % len(eos)]
        spelt = kind % 16 == 1 or not self._words
        token = 0x20 + value % 0x5F if spelt else NUM_BYTES + value % self._words
        return token if token not in eos else ord("-")

    def _stops_at(self, token: int) -> bool:
        if token in self._sampling.stop_token_ids:
            return True
        return token in self._tokenizer.eos_token_ids and not self._sampling.ignore_eos

    def _logprobs(self, state: bytes, token: int) -> tuple[TokenLogprob, ...] | None:
        """Made up but fixed: from the state alone, falling over the alternatives; the sampled token leads them."""
        count = self._sampling.logprobs
        if count is None:
            return None
        first = -math.log1p(state[0] / 256)
        others = [(token + distance) % self._tokenizer.vocab_size for distance in range(count)]
        top = tuple(TopLogprob(self._shown(other), first - rank) for rank, other in enumerate(others))
        return (TokenLogprob(token=self._shown(token), logprob=first, top=top),)

    def _shown(self, token: int) -> str:
        return self._tokenizer.decode((token,))


class StopStrings:
    """Text as it comes, cut before the first stop string; holds back what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self.held = ""
        """Text that may still become a stop string."""

    def push(self, piece: str, *, check: bool, final: bool) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string is complete.

        The stop string that completes first wins. With `check` false none does, as under `min_tokens`: only
        one that ends in a later piece counts. `final`: nothing comes after, so nothing is held back.
        """
        if not self._stops:
            return piece, False
        text = self.held + piece
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if check and piece and (start := text.find(stop, max(0, len(self.held) - len(stop) + 1))) >= 0
        ]
        if found:
            self.held = ""
            return text[: min(found, key=lambda match: match[0])[1]], True
        keep = 0 if final else self._unfinished(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        lengths = range(max(map(len, self._stops), default=1) - 1, 0, -1)
        return next((n for n in lengths if any(_begins(stop, text, n) for stop in self._stops)), 0)


class Answer(NamedTuple):
    """A whole answer."""

    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason


def answer(
    tokenizer: BytesTokenizer, prompt: Sequence[int], sampling: Sampling, max_model_len: int, *, reasons: bool = False
) -> Answer:
    """What any sim engine of this vocabulary answers: the reference that served answers are compared with."""
    state = START
    for token in prompt:
        state = advance(state, token)
    script = script_of(sampling, tokenizer.decode(prompt), reasons=reasons)
    generation = Generation(tokenizer, prompt, sampling, max_model_len - len(prompt), script)
    ids: list[int] = []
    text = ""
    while generation.finish is None:
        tokens = generation.step(state)
        ids += tokens.ids
        text += tokens.text
        state = advance(state, tokens.ids[0])
    return Answer(tuple(ids), text, generation.finish)


def _begins(stop: str, text: str, length: int) -> bool:
    return length < len(stop) and len(text) >= length and stop.startswith(text[len(text) - length :])


def _open_end(tokenizer: BytesTokenizer, prompt: Sequence[int]) -> bytes:
    """The bytes of a character that the prompt begins and does not complete; a character has at most four."""
    tail = b""
    for token in reversed(prompt):
        tail = tokenizer.token_bytes(token) + tail
        if len(tail) >= 3:
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail[-3:])
    return decoder.getstate()[0]
