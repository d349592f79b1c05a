"""Purging a request: it is ended first, then all that is stored of it is removed.

Who still works on it finds no state, which counts as ended, and removes what it has written meanwhile. What is left by
one that died over it is swept up a minute later, by a timer of the broker.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable

import msgspec
from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import Rejected, Unavailable
from pdq.log import Entry, RequestLog, erase, erase_jobs, first
from pdq.messages import PurgeReply, State

from pdq_router import prepare
from pdq_router.timers import Timers

SWEEP_S = 60.0
"""So long after a purge what was written by a process that lagged behind is removed too."""
SETTLE_S, POLL_S = 2.0, 0.1
"""How long a router that holds the submit may take to find that the request has ended."""
SEARCH_S = 5.0
BY_SEQUENCE = re.compile(r"s-\d+\Z")

Cancel = Callable[[str, str], Awaitable[State | None]]


class Erasure:
    """`cancel`: ends a request that the log knows, and returns its final state."""

    def __init__(self, bus: Bus, cancel: Cancel) -> None:
        self._bus = bus
        self._cancel = cancel
        self._log = RequestLog(bus)
        self._timers = Timers(bus)

    async def purge(self, tenant: str, request: str) -> PurgeReply | None:
        """End a request and remove it; None: there is nothing of it. Raises Unavailable: ask again.

        A router that holds the submit, and does not settle it soon, might still accept it. Then the end stays in the
        log until the sweep, and tells nothing but that the request was cancelled.
        """
        entry = await self._log.current(tenant, request)
        seq = entry.state.submit_seq if entry is not None else 0
        seq = seq or await self._waiting(tenant, request)
        if entry is None and not seq:
            strays = await erase(self._bus, tenant, request)
            return PurgeReply(removed=strays) if strays.total else None
        if entry is None:
            await self._log.update(tenant, request, _ended_unseen)
        # Counted here: the cancel takes them too.
        jobs = await erase_jobs(self._bus, tenant, request)
        state = await self._cancel(tenant, request)
        held = state is not None and not accepted(state) and bool(seq) and not await self._let_go(seq)
        submits = int(bool(seq) and await self._bus.delete(subjects.SUBMIT, seq, erase=True))
        await self._timers.set(tenant, request, time.time() + SWEEP_S)
        removed = await erase(self._bus, tenant, request, keep_state=held)
        return PurgeReply(
            event=state.event if state is not None else "",
            removed=msgspec.structs.replace(removed, submits=submits, jobs=jobs + removed.jobs),
        )

    async def _waiting(self, tenant: str, request: str) -> int:
        """Sequence of the submit that asks for a request no router has accepted; 0: there is none."""
        if BY_SEQUENCE.match(request):
            seq = int(request.removeprefix("s-"))
            stored = await self._bus.get(subjects.SUBMIT, seq)
            return seq if stored is not None and _names(stored, tenant, request) else 0
        give_up, after = time.monotonic() + SEARCH_S, 0
        while (stored := await self._bus.first(subjects.SUBMIT, subjects.submit(tenant, "*"), after=after)) is not None:
            if _names(stored, tenant, request):
                return stored.seq
            if time.monotonic() > give_up:
                raise Unavailable(f"too many submits wait to find {request} among them; try again later")
            after = stored.seq
        return 0

    async def _let_go(self, seq: int) -> bool:
        """Whether no router holds a submit whose request has ended: none was given it, or it was settled."""
        for _ in range(int(SETTLE_S / POLL_S)):
            info = await self._bus.consumer_info(subjects.SUBMIT, subjects.ROUTER_CONSUMER)
            if info is not None and int(info["delivered"]["stream_seq"]) < seq:
                # The sweep comes for one that is given out just now.
                return True
            if await self._bus.get(subjects.SUBMIT, seq) is None:
                return True
            await asyncio.sleep(POLL_S)
        return False


def accepted(state: State) -> bool:
    """Whether a router has accepted the request; its end may be written before one has seen it."""
    return bool(state.submit_seq)


def _names(submit: Stored, tenant: str, request: str) -> bool:
    if subjects.parse_submit(submit.subject).tenant != tenant:
        return False
    try:
        return prepare.request_id(submit.headers, submit.seq) == request
    except Rejected:
        return prepare.sequence_id(submit.headers, submit.seq) == request


def _ended_unseen(newest: Entry | None) -> State | None:
    return first("cancelled", cause="client") if newest is None else None
