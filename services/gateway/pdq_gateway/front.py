"""Around all routes: the caller's request id, what is counted, and one line of log for each request."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

from litestar.types import ASGIApp

from pdq_gateway.leaving import Receive, Send
from pdq_gateway.metrics import GatewayMetrics
from pdq_gateway.routes import route_of

log = logging.getLogger("pdq.gateway")

_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")


class Front:
    """An ASGI application around the gateway's own."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        watched = _Watched(scope, send, self._metrics)
        try:
            await self._app(scope, receive, watched.send)
        finally:
            watched.end()


class _Watched:
    """One request's answer as it goes out."""

    def __init__(self, scope: Any, send: Send, metrics: GatewayMetrics) -> None:
        self._send = send
        self._metrics = metrics
        self._began = time.monotonic()
        self._method = scope["method"]
        self._route = route_of(scope["path"])
        self._status = 0
        self._streams = False
        self._first_byte = False
        self._request = ""
        # Echoed for the caller's own logs, and never used as a name: it may be anything, and anyone's.
        self._own = [(name, value) for name, value in scope["headers"] if name == b"x-request-id" and _ID.match(value)]

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start(message)
        elif not self._first_byte:
            self._first_byte = True
            self._metrics.first_byte(self._route, time.monotonic() - self._began)
        await self._send(message)

    def _start(self, message: Any) -> None:
        headers = dict(message.get("headers", ()))
        self._status = message["status"]
        self._request = headers.get(b"x-pdq-request", b"").decode()
        self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        message["headers"] = [*message.get("headers", ()), *self._own[:1]]
        if self._streams:
            self._metrics.stream_began()

    def end(self) -> None:
        if self._streams:
            self._metrics.stream_ended()
        self._metrics.ended(self._route, self._status)
        fields = {"action": "gateway.request", "method": self._method, "route": self._route, "status": self._status}
        took_ms = round((time.monotonic() - self._began) * 1e3, 1)
        log.info("request", extra={**fields, "request_id": self._request, "took_ms": took_ms})
