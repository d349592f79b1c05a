"""uvicorn, in the process shape of pdq's services: no signals of its own, no logs but warnings, a bounded stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from pdq.errors import Misconfigured
from pdq.settings import GatewaySettings

from pdq_gateway.connection import connection_with

log = logging.getLogger("pdq.gateway")

BACKLOG = 2_048
BREAK_OFF_S = 5.0
"""How long answers that break off may take to do so; a client that left meanwhile cancels its request."""
IDLE_S = 75.0
"""How long a connection may wait for its next request: longer than proxies keep theirs."""


class Server(uvicorn.Server):
    """`started`: it listens."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the service's."""
        yield


def make_server(app: Any, settings: GatewaySettings) -> Server:
    """For an ASGI application. Raises Misconfigured for a certificate that cannot be used."""
    _quiet()
    config = uvicorn.Config(
        app,
        http=connection_with(settings.stall_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=int(settings.drain_s + 2 * BREAK_OFF_S),
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
    try:
        config.load()
    except OSError as exc:
        raise Misconfigured(f"cannot use PDQ_GATEWAY_TLS_CERT {settings.tls_cert!r}: {exc.strerror or exc}") from exc
    return Server(config)


async def serve(server: Server, settings: GatewaySettings, stop: asyncio.Event, over: asyncio.Event) -> None:
    """Serve until `stop`; then take no more, let answers go on for the drain time, and set `over`.

    Raises Misconfigured when the address is taken.
    """
    listening = _listen(settings)
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.tls_cert else "http"
    log.info("serving", extra={"url": f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"})
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server.serve([listening]))
        stopping = group.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=settings.drain_s)
        over.set()


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as exc:
        named = f"PDQ_GATEWAY_HOST {settings.host!r}, PDQ_GATEWAY_PORT {settings.port}"
        raise Misconfigured(f"cannot serve {named}: {exc.strerror or exc}") from exc


def _quiet() -> None:
    """uvicorn tells of its start and end, which the service does; and of answers that break off, which are meant to."""
    found = logging.getLogger("uvicorn.error")
    found.setLevel(logging.WARNING)
    found.addFilter(_unexpected)


def _unexpected(record: logging.LogRecord) -> bool:
    text = str(record.msg)
    return not text.startswith(("ASGI callable returned without completing", "Invalid HTTP request"))
