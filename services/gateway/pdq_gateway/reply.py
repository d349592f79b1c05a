"""What goes out for one request: a whole answer, or a stream of server-sent events. Every send is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pdq_gateway.errors import Refusal
from pdq_gateway.leaving import ClientLeft, Send

JSON = b"application/json"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
SSE = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Or nginx would hold back what is to be seen at once.
    (b"x-accel-buffering", b"no"),
)

RawHeaders = Sequence[tuple[bytes, bytes]]


def event(data: bytes, id: str = "", type: str = "") -> bytes:
    """One server-sent event. `data` holds no line end: it is JSON. `type`: its `event`."""
    named = (f"event: {type}\n" if type else "") + (f"id: {id}\n" if id else "")
    return named.encode() + b"data: " + data + b"\n\n"


class Reply:
    """`headers` go with every answer. `stall_s`: a client that takes nothing for so long counts as gone."""

    def __init__(self, send: Send, headers: RawHeaders, stall_s: float) -> None:
        self.status = 0
        """Of the answer, once it has begun."""
        self.complete = False
        self._send = send
        self._headers = list(headers)
        self._stall_s = stall_s

    async def whole(self, body: bytes, status: int = 200, headers: RawHeaders = ()) -> None:
        await self._start(status, [(b"content-type", JSON), (b"content-length", str(len(body)).encode()), *headers])
        await self._body(body, more=False)

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error; within a stream it is the last event, and nothing says that the answer is done."""
        if not self.status:
            await self.whole(refusal.body, refusal.status, refusal.headers)
        else:
            await self._body(event(refusal.body), more=False)

    async def begin_stream(self) -> None:
        await self._start(200, SSE)

    async def stream(self, data: bytes) -> None:
        await self._body(data, more=True)

    async def end_stream(self, data: bytes) -> None:
        await self._body(data, more=False)

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self.status = status
        await self._bounded({"type": "http.response.start", "status": status, "headers": [*headers, *self._headers]})

    async def _body(self, data: bytes, *, more: bool) -> None:
        # Before: while this is awaited, the server may already report the complete answer.
        self.complete = not more
        await self._bounded({"type": "http.response.body", "body": data, "more_body": more})

    async def _bounded(self, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ClientLeft(f"the client took nothing for {self._stall_s:g} s") from None
