"""The routes, as a Litestar application."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException, MethodNotAllowedException
from litestar.types import ASGIApp
from pdq.api.answers import ModelCard, ModelList
from pdq.client import Client
from pdq.errors import PdqError
from pdq.settings import ModelSpec

from pdq_gateway.ask import Ask, check_place, find_model, read_ask, read_name, resume_after
from pdq_gateway.errors import Refusal, failed, refusal
from pdq_gateway.exchange import Exchange
from pdq_gateway.gateway import Gateway
from pdq_gateway.openapi import document
from pdq_gateway.retrieval import Retrieval
from pdq_gateway.routes import not_served
from pdq_gateway.shapes import CHAT, COMPLETION, Shape
from pdq_gateway.tenancy import tenant_of

log = logging.getLogger("pdq.gateway")

Http = Request[Any, Any, State]


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(request: Http) -> ASGIApp:
    return await _create(request, CHAT)


@post("/v1/completions", status_code=200)
async def create_completion(request: Http) -> ASGIApp:
    return await _create(request, COMPLETION)


@get("/v1/chat/completions/{id:str}")
async def get_chat_completion(request: Http, id: str, stream: bool = False, include_usage: bool = False) -> ASGIApp:
    return _read(request, CHAT, id, stream, include_usage)


@get("/v1/completions/{id:str}")
async def get_completion(request: Http, id: str, stream: bool = False, include_usage: bool = False) -> ASGIApp:
    return _read(request, COMPLETION, id, stream, include_usage)


@get("/v1/models")
async def list_models(request: Http) -> ModelList:
    tenant_of(request.headers, _gateway(request).access)
    specs = _gateway(request).models.by_slug.values()
    return ModelList(data=tuple(map(_card, specs)))


@get("/v1/models/{id:path}")
async def get_model(request: Http, id: str) -> ModelCard:
    tenant_of(request.headers, _gateway(request).access)
    return _card(find_model(_gateway(request).models, id.removeprefix("/")))


@get("/openapi.json", media_type="application/json")
async def get_openapi(request: Http) -> bytes:
    return msgspec.json.encode(document())


def _card(spec: ModelSpec) -> ModelCard:
    return ModelCard(id=spec.id, max_model_len=spec.max_model_len)


async def _create(request: Http, shape: Shape) -> ASGIApp:
    gateway = _gateway(request)
    tenant = tenant_of(request.headers, gateway.access)
    _check_media_type(request)
    ask = read_ask(await _body(request, gateway.settings.stall_s), request.headers, shape.body, gateway.models)
    gateway.refused.check(tenant)
    span = gateway.telemetry.submit(ask.name.request, tenant, ask.model, dict(request.headers))
    return Exchange(gateway, Client(gateway.bus, tenant), ask, shape, span)


def _read(request: Http, shape: Shape, id: str, stream: bool, include_usage: bool) -> ASGIApp:
    gateway = _gateway(request)
    client = Client(gateway.bus, tenant_of(request.headers, gateway.access))
    name = read_name(id, shape.prefix)
    after = resume_after(request.headers)
    check_place(after, name)
    ask = Ask(name=name, stream=stream, include_usage=include_usage, background=True, after=after)
    return Exchange(gateway, client, ask, shape) if stream else Retrieval(gateway, client, ask, shape)


def _gateway(request: Http) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _check_media_type(request: Http) -> None:
    """JSON, uncompressed; no media type at all counts as JSON."""
    sent = request.headers.get("content-type", "application/json")
    if sent.partition(";")[0].strip().lower() != "application/json":
        raise failed("unsupported_media_type", "the body's Content-Type must be application/json", "Content-Type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise failed("unsupported_media_type", "a compressed body is not served", "Content-Encoding")


async def _body(request: Http, bound_s: float) -> bytes:
    try:
        async with asyncio.timeout(bound_s):
            return await request.body()
    except TimeoutError:
        raise failed("request_timeout", f"the body did not come within {bound_s:g} s") from None


# ---- errors


def _on_error(request: Http, error: PdqError) -> Response[bytes]:
    return _refused(refusal(error))


def _on_http(request: Http, error: HTTPException) -> Response[bytes]:
    """Litestar's own: no such path, a wrong verb, a body that is too large, a bad query parameter."""
    path, status = request.scope["path"], error.status_code
    if status == 404:
        return _refused(refusal(failed("not_found", _nothing_at(path))))
    if isinstance(error, MethodNotAllowedException):
        allow = (error.headers or {}).get("allow", "")
        refused = refusal(failed("method_not_allowed", f"{request.method} is not served here; {allow} is"))
        return _refused(Refusal(refused.status, refused.answer, ((b"allow", allow.encode()),)))
    if status == 413:
        limit = _gateway(request).limits.max_msg_bytes
        return _refused(refusal(failed("payload_too_large", f"the body is over the limit of {limit} bytes")))
    if status == 400:
        return _refused(refusal(failed("invalid_value", error.detail)))
    return _on_unexpected(request, error)


def _nothing_at(path: str) -> str:
    what = not_served(path)
    return f"pdq does not serve {what}" if what else "there is nothing at this path"


def _on_unexpected(request: Http, error: Exception) -> Response[bytes]:
    log.error("request failed", exc_info=error)
    return _refused(refusal(failed("internal_error", "the gateway failed")))


def _refused(refused: Refusal) -> Response[bytes]:
    headers = {name.decode(): value.decode() for name, value in refused.headers}
    return Response(refused.body, status_code=refused.status, media_type="application/json", headers=headers)


HANDLERS = [
    create_chat_completion,
    create_completion,
    get_chat_completion,
    get_completion,
    list_models,
    get_model,
    get_openapi,
]


def make_app(gateway: Gateway) -> Litestar:
    return Litestar(
        HANDLERS,
        state=State({"gateway": gateway}),
        exception_handlers={PdqError: _on_error, HTTPException: _on_http, Exception: _on_unexpected},
        request_max_body_size=gateway.limits.max_msg_bytes,
        openapi_config=None,
        logging_config=None,
    )
