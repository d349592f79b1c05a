"""Warm-up: while a handoff waits for decode, its KV is brought near one of the workers that may take it.

Where each worker has a tier of its own, decode first fetches a prompt's KV from the pool or from a peer. A worker whose
slots are all taken hears of each prompt that becomes `prefilled`. It stages those that prefer it, and its share of the
others: the workers alive agree on it by the highest hash, without a word. It reads the waiting job, without taking it,
and has its tier load what it lacks. Another worker may be the one that takes the job: then the load was in vain.

One prompt at a time, a few that wait, and no more bytes than have room; what is claimed or has ended is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from hashlib import blake2b
from typing import Literal

import msgspec

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import UNREADABLE
from pdq.messages import TERMINAL, DecodeJob, Lane, Priority, Promise, decode_job
from pdq.stage.fleet import Fleet
from pdq.telemetry import Metrics

log = logging.getLogger("pdq.stage")

MOST_WAITING = 4
"""Prompts to be staged, the one under way included; more are left to whoever takes them."""
MOST_STAGED, FORGET_S = 64, 300.0
"""Staged prompts that nobody has claimed yet, and for how long they count as waiting: a live copy of a state that says
otherwise can be lost."""
JOB_TRIES, JOB_PAUSE_S = 5, 0.05
"""The job comes right after the record that says `prefilled`."""

Request = tuple[str, str]
"""Tenant and request."""
Stage = Callable[[DecodeJob], Awaitable[int]]
"""Brings a prompt's KV near; returns how many tokens of it are there now."""


class Staged(msgspec.Struct, frozen=True):
    """What was brought near for a request, and how long that took."""

    tokens: int
    num_bytes: int
    took_s: float
    at: float
    """When it was done, `time.monotonic`."""


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What counts here of a `State`."""

    event: str = ""
    stage: str = ""
    worker: str = ""
    model: str = ""
    order: str = ""
    priority: Priority = "normal"
    lane: Lane | Literal[""] = ""
    prefer: str = ""
    promise: Promise | None = None

    @property
    def settled(self) -> bool:
        """Whether the request waits for decode no more."""
        return self.event in TERMINAL or (self.event == "claim" and self.stage == "decode")


_seen = msgspec.json.Decoder(_Seen)


def chosen(request: Request, prefer: str, alive: Iterable[str]) -> str:
    """The one worker of those alive that stages a request: the preferred one, else the highest hash. Pure."""
    workers = sorted(alive)
    if prefer in workers:
        return prefer
    name = ".".join(request)
    return max(workers, key=lambda worker: blake2b(f"{name} {worker}".encode(), digest_size=8).digest(), default="")


class Staging:
    """Of one decode worker. Told of all live states by `hear`; works while `run` does."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        metrics: Metrics,
        worker: str,
        *,
        model: str,
        contract: str,
        full: Callable[[], bool],
        stage: Stage,
        room_bytes: int,
    ) -> None:
        """contract: of the KV that this worker can use. full: whether all its slots are taken. room_bytes: of KV that
        is staged and waits."""
        self._bus = bus
        self._fleet = fleet
        self._metrics = metrics
        self._worker = worker
        self._model = model
        self._contract = contract
        self._full = full
        self._stage = stage
        self._room_bytes = room_bytes
        self._waiting: dict[Request, _Seen] = {}
        self._staged: dict[Request, Staged] = {}
        self._came = asyncio.Event()

    def hear(self, stored: Stored) -> None:
        """Take in one state record of a request."""
        try:
            seen = _seen.decode(stored.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        where = subjects.parse_log(stored.subject)
        request = (where.tenant, where.request)
        if seen.settled:
            self._waiting.pop(request, None)
            if seen.event != "claim" or seen.worker != self._worker:
                self._forget(request)
        elif self._wants(seen) and len(self._waiting) < MOST_WAITING:
            self._waiting[request] = seen
            self._came.set()

    def taken(self, tenant: str, request: str) -> Staged | None:
        """What was staged of a request that this worker has claimed; it is counted as of use."""
        staged = self._staged.pop((tenant, request), None)
        if staged is not None:
            self._metrics.staged(staged.tokens, used=True)
        return staged

    async def run(self) -> None:
        """Stage one prompt after the other, until cancelled."""
        while True:
            await self._came.wait()
            while self._waiting:
                request = next(iter(self._waiting))
                seen = self._waiting[request]
                try:
                    await self._one(request, seen)
                except Exception:
                    # Whatever it is: the worker does without.
                    log.warning("a prompt was not staged", exc_info=True, extra={"request_id": request[1]})
                finally:
                    self._waiting.pop(request, None)
            self._came.clear()

    def _wants(self, seen: _Seen) -> bool:
        """Whether a record tells of KV that waits, could be used here, and has room."""
        if seen.event != "prefilled" or seen.order != "prefill-first" or seen.model != self._model:
            return False
        promise = seen.promise
        if promise is None or not promise.tokens or promise.contract != self._contract or not self._full():
            return False
        self._forget_old()
        waits = (other.promise for other in self._waiting.values())
        held = sum(staged.num_bytes for staged in self._staged.values()) + sum(each.bytes for each in waits if each)
        return held + promise.bytes <= self._room_bytes

    async def _one(self, request: Request, seen: _Seen) -> None:
        beats = await self._fleet.beats("decode", self._model)
        if chosen(request, seen.prefer, {beat.worker for beat in beats}) != self._worker:
            return
        job = await self._job(request, seen)
        if job is None or request not in self._waiting:
            return
        began = time.monotonic()
        tokens = await self._stage(job)
        now = time.monotonic()
        staged = Staged(tokens, seen.promise.bytes if seen.promise else 0, now - began, now)
        if tokens and request in self._waiting:
            self._remember(request, staged)
        elif tokens:
            self._metrics.staged(tokens, used=False)

    async def _job(self, request: Request, seen: _Seen) -> DecodeJob | None:
        """The waiting job, which stays where it is; None: it is gone, or does not come."""
        subject = subjects.job("decode", seen.model, seen.lane or seen.priority, *request)
        for _ in range(JOB_TRIES):
            if request not in self._waiting:
                return None
            stored = await self._bus.last(subjects.DECODE, subject)
            if stored is not None:
                with contextlib.suppress(*UNREADABLE):
                    return decode_job(stored.data, DecodeJob)
                return None
            await asyncio.sleep(JOB_PAUSE_S)
        return None

    def _remember(self, request: Request, staged: Staged) -> None:
        self._staged[request] = staged
        if len(self._staged) > MOST_STAGED:
            self._forget(next(iter(self._staged)))

    def _forget_old(self) -> None:
        oldest = time.monotonic() - FORGET_S
        for request in [request for request, staged in self._staged.items() if staged.at < oldest]:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if (staged := self._staged.pop(request, None)) is not None:
            self._metrics.staged(staged.tokens, used=False)
