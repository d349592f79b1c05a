"""What tenants ask the router, and its answers."""

from __future__ import annotations

import msgspec

from pdq.messages.log import ErrorInfo, Output, State


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a request to `pdq.read.<tenant>.<request>`: events after a sequence."""

    after: int = 0
    limit: int = 256


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stored record of the log, as a reader gets it: exactly one of `state` and `out` is set."""

    seq: int
    state: State | None = None
    out: Output | None = None


class ReadPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the read endpoint. `more` says that another page follows `events[-1].seq`."""

    v: int = 1
    events: tuple[Event, ...] = ()
    more: bool = False
    error: ErrorInfo | None = None


class CancelReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the cancel endpoint: the state the request is in now."""

    v: int = 1
    state: State | None = None
    error: ErrorInfo | None = None


class Removed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How many stored messages of a request a purge has removed, by kind."""

    submits: int = 0
    jobs: int = 0
    dead_letters: int = 0
    events: int = 0
    """Records of its log."""

    @property
    def total(self) -> int:
        return self.submits + self.jobs + self.dead_letters + self.events


class PurgeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of the purge endpoint: the event that the request had ended with, and what of it was removed.

    `event` is empty where only dead letters, or nothing but strays, were left of it.
    """

    v: int = 1
    event: str = ""
    removed: Removed = Removed()
    error: ErrorInfo | None = None
