"""What every tenant has under way, and had in the last minute: counted from the states of its requests.

A request counts from where this process admits it, or hears that another one did (`routed`), until it hears of its end.
All who count hear the same live states, so they agree but for what is on its way to them: a round trip of the broker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from pdq import subjects
from pdq.bus import Stored
from pdq.messages import TERMINAL, Priority, StageClaims, Usage
from pdq.tenants.window import Window

OTHERS_S = 3_600.0
"""How long a tenant counts as one of several after it was heard of."""
SWEEP_S = 30.0
UNHEARD_S = 60.0
"""What was admitted here and not heard of for so long was never routed: it was known already, say."""
FRESH_S = 10.0
"""What was admitted so shortly before need not be in a queue yet."""

Request = tuple[str, str]
"""Tenant and request."""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What counts here of a `State`."""

    event: str = ""
    model: str = ""
    priority: Priority = "normal"
    prompt_tokens: int = 0
    max_tokens: int = 0
    prefill: StageClaims = StageClaims()
    decode: StageClaims = StageClaims()
    usage: Usage | None = None


_seen = msgspec.json.Decoder(_Seen)


class Entry(msgspec.Struct, kw_only=True):
    """A request in flight. `tokens`: its prompt's, and the most that it may generate."""

    model: str
    priority: Priority
    tokens: int
    admitted: float
    heard: float
    """When the last state of it came; when it was admitted, where none has come yet."""
    waiting: bool = True
    """No worker has it."""
    routed: bool = False
    """A state of it has come."""

    @property
    def queue(self) -> tuple[str, Priority]:
        return self.model, self.priority


class Book:
    """What one tenant has."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.tokens = 0
        self.waiting: Counter[tuple[str, Priority]] = Counter()
        """Requests that no worker has, by model and priority."""
        self.requests_minute = Window()
        self.tokens_minute = Window()

    def put(self, request: str, entry: Entry) -> None:
        self.entries[request] = entry
        self.tokens += entry.tokens
        self.waiting[entry.queue] += entry.waiting

    def count(self, entry: Entry) -> None:
        """Count a new request for this minute."""
        self.requests_minute.add(1, entry.admitted)
        self.tokens_minute.add(entry.tokens, entry.admitted)

    def weigh(self, entry: Entry, tokens: int) -> None:
        """Correct the tokens of an entry."""
        self.tokens_minute.change(tokens - entry.tokens, entry.admitted)
        self.tokens += tokens - entry.tokens
        entry.tokens = tokens

    def wait(self, entry: Entry, waiting: bool) -> None:
        self.waiting[entry.queue] += waiting - entry.waiting
        entry.waiting = waiting

    def remove(self, request: str) -> Entry:
        entry = self.entries.pop(request)
        self.wait(entry, False)
        self.tokens -= entry.tokens
        if not self.waiting[entry.queue]:
            del self.waiting[entry.queue]
        return entry

    def is_empty(self, now: float) -> bool:
        return not (self.entries or self.requests_minute.total(now) or self.tokens_minute.total(now))


class _Lately(NamedTuple):
    tenant: str = ""
    at: float = float("-inf")


class TenantUsage:
    """longest_s: what is not heard of for so long is taken to have ended; longer than any deadline."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._books: dict[str, Book] = {}
        self._lately = (_Lately(), _Lately())
        """The tenant that was heard of last, and the last one before it with another name."""
        self._swept = clock()

    def of(self, tenant: str) -> Book:
        """To read; `admit` and `hear` write."""
        self._sweep()
        return self._books.get(tenant) or Book()

    def __contains__(self, request: Request) -> bool:
        book = self._books.get(request[0])
        return book is not None and request[1] in book.entries

    def now(self) -> float:
        return self._clock()

    def others(self, tenant: str) -> bool:
        """Whether any other tenant was heard of lately."""
        last, before = self._lately
        return (before if last.tenant == tenant else last).at > self._clock() - OTHERS_S

    def admit(self, tenant: str, request: str, *, model: str, priority: Priority, tokens: int) -> None:
        """Count a request that is admitted here; one that is counted already stays as it is."""
        if (tenant, request) not in self:
            self._add(tenant, request, model, priority, tokens, new=True)

    def forget(self, tenant: str, request: str) -> None:
        """Count a request no more that was never submitted, for this minute neither."""
        book = self._books.get(tenant)
        if book is not None and request in book.entries:
            entry = book.remove(request)
            book.requests_minute.change(-1, entry.admitted)
            book.tokens_minute.change(-entry.tokens, entry.admitted)

    def hear(self, stored: Stored, *, new: bool = True) -> None:
        """Take in a state record of a request. new: it is one of now, not read back. What cannot be read is not
        counted."""
        try:
            seen = _seen.decode(stored.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        tenant, request, _ = subjects.parse_log(stored.subject)
        self._note(tenant)
        if seen.event in TERMINAL:
            self._end(tenant, request, seen)
        elif seen.event != "accepted":
            self._update(tenant, request, seen, new)

    def keep(self, queued: Collection[Request]) -> None:
        """Forget what is in flight by what was heard, but in no queue: its end was missed."""
        late = self._clock() - FRESH_S
        self._drop(lambda request, entry: request not in queued and entry.heard < late)

    def _update(self, tenant: str, request: str, seen: _Seen, new: bool) -> None:
        tokens = seen.prompt_tokens + seen.max_tokens
        if (tenant, request) not in self:
            self._add(tenant, request, seen.model, seen.priority, tokens, new)
        book = self._books[tenant]
        entry = book.entries[request]
        entry.heard, entry.routed = self._clock(), True
        book.weigh(entry, tokens)
        book.wait(entry, not (seen.prefill.owner or seen.decode.owner))

    def _add(self, tenant: str, request: str, model: str, priority: Priority, tokens: int, new: bool) -> None:
        self._note(tenant)
        now = self._clock()
        entry = Entry(model=model, priority=priority, tokens=tokens, admitted=now, heard=now)
        book = self._books.setdefault(tenant, Book())
        book.put(request, entry)
        if new:
            book.count(entry)

    def _end(self, tenant: str, request: str, seen: _Seen) -> None:
        book = self._books.get(tenant)
        if book is None or request not in book.entries:
            return
        used = seen.usage.total_tokens if seen.usage is not None else 0
        book.weigh(book.entries[request], min(used, book.entries[request].tokens))
        book.remove(request)

    def _note(self, tenant: str) -> None:
        last, _ = self._lately
        now = _Lately(tenant, self._clock())
        self._lately = (now, self._lately[1]) if last.tenant == tenant else (now, last)

    def _sweep(self) -> None:
        """Now and then: what ended unheard, and the books that nothing is in."""
        now = self._clock()
        if now - self._swept < SWEEP_S:
            return
        self._swept = now
        self._drop(lambda _, entry: entry.heard < now - (self._longest_s if entry.routed else UNHEARD_S))
        self._books = {tenant: book for tenant, book in self._books.items() if not book.is_empty(now)}

    def _drop(self, ended: Callable[[Request, Entry], bool]) -> None:
        for tenant, book in self._books.items():
            for request in [name for name, entry in book.entries.items() if ended((tenant, name), entry)]:
                book.remove(request)
