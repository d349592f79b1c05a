"""What a tenant may ask of the router: to read a request's log, to cancel a request, and to purge one."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import PdqError, Rejected
from pdq.log import Entry, RequestLog, first, follow
from pdq.messages import (
    CancelReply,
    ErrorInfo,
    Event,
    PurgeReply,
    ReadPage,
    ReadRequest,
    State,
    decode_json,
    encode_json,
)

from pdq_router.endings import Endings, running
from pdq_router.erasure import Erasure

log = logging.getLogger("pdq.router")

GRACE_S = 2.0
"""How long a worker that was told to stop may take to end the request itself."""
POLL_S = 0.05
PAGE_BYTES = 512 * 1024
QUEUE_GROUP = "pdq-router"


class Endpoints:
    def __init__(self, bus: Bus, endings: Endings) -> None:
        self._bus = bus
        self._endings = endings
        self._log = RequestLog(bus)
        self._erasure = Erasure(bus, self.cancel)

    async def start(self) -> None:
        served = (
            (subjects.READ_ALL, self._read),
            (subjects.CANCEL_ALL, self._cancel),
            (subjects.PURGE_ALL, self._purge),
        )
        for subject, answer in served:
            await self._bus.patiently(partial(self._bus.serve, subject, QUEUE_GROUP, answer))

    async def _read(self, subject: str, data: bytes) -> bytes:
        try:
            tenant, request = _whose(subject)
            wanted = decode_json(data or b"{}", ReadRequest)
            page = await self._log.read(tenant, request, after=wanted.after, limit=wanted.limit)
        except PdqError as exc:
            return encode_json(ReadPage(error=ErrorInfo(code=exc.code, message=str(exc))))
        return encode_json(_bounded(page))

    async def _cancel(self, subject: str, data: bytes) -> bytes:
        try:
            tenant, request = _whose(subject)
            state = await self.cancel(tenant, request)
        except PdqError as exc:
            return encode_json(CancelReply(error=ErrorInfo(code=exc.code, message=str(exc))))
        if state is None:
            return encode_json(CancelReply(error=_not_found(request)))
        return encode_json(CancelReply(state=state))

    async def _purge(self, subject: str, data: bytes) -> bytes:
        try:
            tenant, request = _whose(subject)
            reply = await self._erasure.purge(tenant, request)
        except PdqError as exc:
            return encode_json(PurgeReply(error=ErrorInfo(code=exc.code, message=str(exc))))
        if reply is None:
            return encode_json(PurgeReply(error=_not_found(request)))
        fields = {"action": "router.purged", "request_id": request, "num_removed": reply.removed.total}
        log.info("purged", extra=fields)
        return encode_json(reply)

    async def cancel(self, tenant: str, request: str) -> State | None:
        """End a request and return its final state; None: there is none. Raises Unavailable.

        A running worker is told, and given `GRACE_S` to store its tokens and write the end.
        """

        entry = await self._log.update(tenant, request, _cancelling)
        if entry is None and await self._some_submit_waits(tenant):
            # It may be the one: its end is written before a router has seen it.
            entry = await self._log.update(tenant, request, _cancelled_unseen)
        if entry is None:
            return None
        if not entry.state.ended and running(entry.state):
            await self._wait_for_end(tenant, request)
        ended = await self._endings.end(tenant, request, "cancelled", cause="client")
        return ended.state if ended is not None else None

    async def _some_submit_waits(self, tenant: str) -> bool:
        info = await self._bus.stream_info(subjects.SUBMIT, subjects.submit(tenant, "*"))
        return info is not None and bool(info["state"].get("subjects"))

    async def _wait_for_end(self, tenant: str, request: str) -> None:
        for _ in range(int(GRACE_S / POLL_S)):
            await asyncio.sleep(POLL_S)
            entry = await self._log.current(tenant, request)
            if entry is None or entry.state.ended:
                return


def _whose(subject: str) -> tuple[str, str]:
    """Tenant and request of an endpoint's subject.

    Raises Rejected for what names more than one: the server delivers a request to `pdq.cancel.t.*` too.
    """
    _, _, tenant, request = subject.split(".")
    if not subjects.is_token(tenant) or not subjects.is_token(request):
        raise Rejected("tenant and request must match [A-Za-z0-9_-]{1,64}", code="invalid_request_id")
    return tenant, request


def _not_found(request: str) -> ErrorInfo:
    return ErrorInfo(code="not_found", message=f"no request {request}")


def _cancelling(newest: Entry | None) -> State | None:
    if newest is None or newest.state.ended or not running(newest.state) or newest.state.event == "cancelling":
        return None
    return follow(newest.state, "cancelling", cause="client")


def _cancelled_unseen(newest: Entry | None) -> State | None:
    return first("cancelled", cause="client") if newest is None else _cancelling(newest)


def _bounded(page: ReadPage) -> ReadPage:
    """As many events of a page as fit into one answer; at least one."""
    size, fitting = 0, list[Event]()
    for event in page.events:
        size += len(encode_json(event))
        if fitting and size > PAGE_BYTES:
            return ReadPage(events=tuple(fitting), more=True)
        fitting.append(event)
    return page
