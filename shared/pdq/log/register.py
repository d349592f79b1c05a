"""`state`: the register of a request, and reading its log.

Every record names the last one its writer has read, so of two writers one is refused, reads again and
decides anew. Nothing follows a terminal record; there is exactly one. Each write carries a nonce, by which
a writer whose acknowledgement was lost knows its own record.
"""

from __future__ import annotations

import contextlib
import enum
import secrets
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import Unavailable, WrongSequence
from pdq.log.transcript import Transcript
from pdq.messages import Event, Output, ReadPage, State, StateEvent, Usage, decode_json, encode_json

MAX_TRIES = 20
"""Compare-and-set rounds before giving up: each lost round means that somebody else made progress."""
MAX_PAGE, MAX_PAGE_BYTES = 1_000, 512 << 10


class Entry(NamedTuple):
    """A stored state record and its sequence in the log."""

    seq: int
    state: State


class _Unread(enum.Enum):
    UNREAD = enum.auto()


UNREAD = _Unread.UNREAD
"""Nothing is known of the newest record."""
Known = Entry | _Unread | None

Change = Callable[[Entry | None], State | None]
"""Given the newest record, the record to append; None: nothing to do."""


class RequestLog:
    """The log of all requests, over one Bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def current(self, tenant: str, request: str) -> Entry | None:
        """The newest state record, never stale; None when there is none (unknown, purged or too old)."""
        stored = await self._bus.last(subjects.LOG, subjects.state(tenant, request))
        return None if stored is None else Entry(stored.seq, decode_json(stored.data, State))

    async def append(self, tenant: str, request: str, after: Entry | None, state: State) -> Entry:
        """Append one record right after `after` (None: as the first). Raises WrongSequence or Unavailable."""
        try:
            return await self._write(tenant, request, after, state)
        except WrongSequence:
            newest = await self.current(tenant, request)
            if newest is not None and newest.state.nonce == state.nonce:
                return newest
            raise

    async def update(self, tenant: str, request: str, change: Change, *, known: Known = UNREAD) -> Entry | None:
        """Decide and append until it holds; returns the newest record.

        `change` sees every record that got in between and may decide otherwise each time.
        known: what the caller takes for the newest record (None: that there is none). That is tried first, and
        the log is read only when the broker refuses it, or when `change` writes nothing after it.
        Raises Unavailable when others always win, which many rounds make absurd.
        """
        read = known is UNREAD
        newest = await self.current(tenant, request) if known is UNREAD else known
        for _ in range(MAX_TRIES):
            state = change(newest)
            if state is not None:
                with contextlib.suppress(WrongSequence):
                    return await self._write(tenant, request, newest, state)
            elif read:
                return newest
            newest, read = await self.current(tenant, request), True
            if state is not None and newest is not None and newest.state.nonce == state.nonce:
                return newest
        raise Unavailable(f"request {request}: its state changed {MAX_TRIES} times while it was being written")

    async def end(self, tenant: str, request: str, change: Change) -> tuple[Entry | None, bool]:
        """As `update`, for an end that is written in a worker's place: it names the tokens stored by now.

        Returns the newest record, and whether it is the one written here.
        """
        shown = await self.transcript(tenant, request)
        nonce = ""

        def ending(newest: Entry | None) -> State | None:
            nonlocal nonce
            state = change(newest)
            if state is not None and newest is not None:
                state = msgspec.structs.replace(state, **_output(newest.state, shown))
            nonce = state.nonce if state is not None else ""
            return state

        entry = await self.update(tenant, request, ending)
        return entry, entry is not None and entry.state.nonce == nonce

    async def transcript(self, tenant: str, request: str) -> Transcript:
        """What a request's log shows by now."""
        shown, more = Transcript(), True
        while more:
            page = await self.read(tenant, request, after=shown.seq, limit=MAX_PAGE)
            for event in page.events:
                shown.feed(event)
            more = page.more
        return shown

    async def read(self, tenant: str, request: str, *, after: int = 0, limit: int = 256) -> ReadPage:
        """One page of a request's events after a sequence, in stream order."""
        limit = max(1, min(limit, MAX_PAGE))
        where = subjects.log_of(tenant, request)
        stored = await self._bus.read(subjects.LOG, where, after=after, limit=limit, max_bytes=MAX_PAGE_BYTES)
        more = bool(stored) and stored[-1].num_after > 0
        return ReadPage(events=tuple(map(to_event, stored)), more=more)

    async def read_up_to(self, tenant: str, request: str, seq: int) -> list[Event]:
        """All events up to and including `seq`, which must be one of this request's own records.

        Raises Unavailable when that record is not there (yet): then something before it may be missing too.
        """
        events: list[Event] = []
        while not events or events[-1].seq < seq:
            page = await self.read(tenant, request, after=events[-1].seq if events else 0, limit=MAX_PAGE)
            if not page.events:
                raise Unavailable(f"request {request}: record {seq} of its log cannot be read yet")
            events.extend(page.events)
        return [event for event in events if event.seq <= seq]

    async def _write(self, tenant: str, request: str, after: Entry | None, state: State) -> Entry:
        """Raises WrongSequence, also when an acknowledgement was lost and the record is there."""
        subject = subjects.state(tenant, request)
        ack = await self._bus.publish(subject, encode_json(state), expect_last=after.seq if after else 0)
        return Entry(ack.seq, state)


def first(event: StateEvent, **fields: Any) -> State:
    """A record that begins a register."""
    return State(event=event, nonce=secrets.token_hex(8), at=time.time(), **fields)


def follow(state: State, event: StateEvent, **changes: Any) -> State:
    """The record after `state`: the same register with changes. What is said of one event only is reset."""
    once = {"stage": "", "worker": "", "cause": "", "inputs": {}}
    made = {"event": event, "nonce": secrets.token_hex(8), "at": time.time()}
    return msgspec.structs.replace(state, **(once | made | changes))


def to_event(stored: Stored) -> Event:
    """A stored record as a reader gets it. Raises NotDecodable or NewerVersion."""
    if subjects.parse_log(stored.subject).kind == "state":
        return Event(seq=stored.seq, state=decode_json(stored.data, State))
    return Event(seq=stored.seq, out=decode_json(stored.data, Output))


def _output(state: State, shown: Transcript) -> dict[str, Any]:
    """What an end says of the tokens; nothing before decode."""
    if not state.decode.attempt:
        return {}
    made = len(shown.ids)
    usage = Usage(prompt_tokens=state.prompt_tokens, completion_tokens=made, total_tokens=state.prompt_tokens + made)
    return {"num_tokens": made, "output_digest": shown.digest(), "usage": usage}
