"""What all routes take from a request before they look at what it asks for."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import InternalServerException
from pdq.client import Client

from pdq_gateway.errors import failed
from pdq_gateway.gateway import Gateway
from pdq_gateway.tenancy import tenant_of

Http = Request[Any, Any, State]


def gateway_of(request: Http) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def client_of(request: Http) -> Client:
    """The view of the tenant whose request it is. Raises Unauthorized."""
    gateway = gateway_of(request)
    return Client(gateway.bus, tenant_of(request.headers, gateway.access))


def check_media_type(request: Http) -> None:
    """JSON, uncompressed; no media type at all counts as JSON. Raises Failed."""
    sent = request.headers.get("content-type", "application/json")
    if sent.partition(";")[0].strip().lower() != "application/json":
        raise failed("unsupported_media_type", "the body's Content-Type must be application/json", "Content-Type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise failed("unsupported_media_type", "a compressed body is not served", "Content-Encoding")


async def body_of(request: Http) -> bytes:
    """Raises Failed when it does not come."""
    bound_s = gateway_of(request).settings.stall_s
    try:
        async with asyncio.timeout(bound_s):
            return await request.body()
    except TimeoutError:
        raise failed("request_timeout", f"the body did not come within {bound_s:g} s") from None
    except InternalServerException:
        raise failed("cancelled", "the client left before its body had come") from None
