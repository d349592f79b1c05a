"""What is likely known of a prompt's KV: which leading part some request had before, and who decoded it.

A position is the end of a whole chunk of a prompt, named by a hash over the model, the tenant and all tokens up to it:
equal begins meet, those of two tenants never do. The last position of a prompt stands in the request's register
(`prefix`), so that every router learns from every live state: that its KV can be read (`prefilled`), and which worker
decodes it (a claim). Of the prompts that it routed itself a router remembers the positions before the last too: they
are what prompts with a common begin, such as a system prompt, share.

A conversation's next prompt begins with its last one, whose end names the worker that it prefers. Positions in the
midst of a prompt name none: all who share a system prompt need not share a worker.

All of it is an estimate: nobody tells the router what is evicted. What a worker finds in its tiers is the truth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import msgspec
from pdq.bus import Stored
from pdq.messages import Promise, pack_ids

POSITIONS_PER_PROMPT = 100
"""Prompts on their way are remembered to one for so many positions; their own are not counted."""
HASH_BYTES = 8
ID_BYTES = 4

T = TypeVar("T")


class Likely(NamedTuple):
    """cached_tokens: of the prompt's start, whose KV can likely be loaded. worker: whom it prefers; empty: nobody."""

    cached_tokens: int = 0
    worker: str = ""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What counts here of a `State`."""

    event: str = ""
    stage: str = ""
    worker: str = ""
    prefix: str = ""
    promise: Promise | None = None


_seen = msgspec.json.Decoder(_Seen)


def positions(model: str, tenant: str, prompt: Sequence[int], chunk_tokens: int) -> tuple[str, ...]:
    """The names of a prompt's whole chunks, in order: 16 hex digits each."""
    packed = pack_ids(prompt)
    size = chunk_tokens * ID_BYTES
    name = blake2b(f"{model} {tenant} {chunk_tokens}".encode(), digest_size=HASH_BYTES).digest()
    names = []
    for end in range(size, len(packed) + 1, size):
        name = blake2b(name + packed[end - size : end], digest_size=HASH_BYTES).digest()
        names.append(name.hex())
    return tuple(names)


class Prefixes:
    """Bounded; the positions that were used least recently go first."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._num_routed = max(1, num_positions // POSITIONS_PER_PROMPT)
        self._workers: OrderedDict[str, str] = OrderedDict()
        """By position; an empty worker: its KV can be read, and nobody is preferred."""
        self._routed: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """All positions of a prompt routed here, by its last."""

    def routed(self, names: tuple[str, ...]) -> None:
        """A prompt with these positions is on its way to a worker."""
        if names:
            _put(self._routed, names[-1], names, self._num_routed)

    def hear(self, stored: Stored) -> None:
        """Take in one state record of a request; what cannot be read teaches nothing."""
        try:
            seen = _seen.decode(stored.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        readable = seen.event == "prefilled" and seen.promise is not None and seen.promise.tokens > 0
        claimed = seen.event == "claim" and seen.stage == "decode"
        if seen.prefix and (readable or claimed):
            self._learn(seen.prefix, seen.worker if claimed else "")

    def likely(self, names: Sequence[str], chunk_tokens: int) -> Likely:
        """What is known of a prompt with these positions."""
        known = [place for place, name in enumerate(names) if name in self._workers]
        if not known:
            return Likely()
        for place in known:
            self._workers.move_to_end(names[place])
        workers = (self._workers[names[place]] for place in reversed(known))
        return Likely((known[-1] + 1) * chunk_tokens, next(filter(None, workers), ""))

    def _learn(self, last: str, worker: str) -> None:
        for name in self._routed.pop(last, (last,))[:-1]:
            _put(self._workers, name, self._workers.get(name, ""), self._num_positions)
        _put(self._workers, last, worker or self._workers.get(last, ""), self._num_positions)


def _put(kept: OrderedDict[str, T], key: str, value: T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
