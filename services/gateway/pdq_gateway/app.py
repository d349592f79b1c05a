"""The routes, as a Litestar application."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Litestar, Response, delete, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException, MethodNotAllowedException
from litestar.types import ASGIApp
from pdq.api.answers import Deleted, ModelCard, ModelList
from pdq.api.refusals import refuse
from pdq.client import Client
from pdq.errors import PdqError
from pdq.settings import ModelSpec

from pdq_gateway.ask import Ask, check_place, find_model, read_ask, read_name, resume_after
from pdq_gateway.erasing import erase
from pdq_gateway.errors import Failed, Refusal, failed, refusal
from pdq_gateway.exchange import Exchange
from pdq_gateway.gateway import Gateway
from pdq_gateway.intake import Http, body_of, check_media_type, client_of, gateway_of
from pdq_gateway.openapi import document
from pdq_gateway.responses_routes import RESPONSES
from pdq_gateway.retrieval import Retrieval
from pdq_gateway.routes import not_served
from pdq_gateway.shapes import CHAT, COMPLETION, Shape
from pdq_gateway.tenancy import tenant_of

log = logging.getLogger("pdq.gateway")


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


@delete("/v1/chat/completions/{id:str}", status_code=200)
async def delete_chat_completion(request: Http, id: str, purge: bool = True) -> Deleted:
    return await _delete(request, CHAT, id, purge, "chat.completion.deleted")


@delete("/v1/completions/{id:str}", status_code=200)
async def delete_completion(request: Http, id: str, purge: bool = True) -> Deleted:
    return await _delete(request, COMPLETION, id, purge, "text_completion.deleted")


@get("/v1/models")
async def list_models(request: Http) -> ModelList:
    tenant_of(request.headers, gateway_of(request).access)
    specs = gateway_of(request).models.by_slug.values()
    return ModelList(data=tuple(map(_card, specs)))


@get("/v1/models/{id:path}")
async def get_model(request: Http, id: str) -> ModelCard:
    tenant_of(request.headers, gateway_of(request).access)
    return _card(find_model(gateway_of(request).models, id.removeprefix("/")))


@get("/openapi.json", media_type="application/json")
async def get_openapi(request: Http) -> bytes:
    return msgspec.json.encode(document())


def _card(spec: ModelSpec) -> ModelCard:
    return ModelCard(id=spec.id, max_model_len=spec.max_model_len)


async def _create(request: Http, shape: Shape) -> ASGIApp:
    gateway = gateway_of(request)
    tenant = tenant_of(request.headers, gateway.access)
    check_media_type(request)
    ask = read_ask(await body_of(request), request.headers, shape.body, gateway.models)
    gateway.refused.check(tenant)
    span = gateway.telemetry.submit(ask.name.request, tenant, ask.model, dict(request.headers))
    return Exchange(gateway, Client(gateway.bus, tenant), ask, shape, span)


def _read(request: Http, shape: Shape, id: str, stream: bool, include_usage: bool) -> ASGIApp:
    gateway = gateway_of(request)
    client = client_of(request)
    name = read_name(id, shape.prefix)
    after = resume_after(request.headers)
    check_place(after, name)
    ask = Ask(name=name, stream=stream, include_usage=include_usage, background=True, after=after)
    return Exchange(gateway, client, ask, shape) if stream else Retrieval(gateway, client, ask, shape)


async def _delete(request: Http, shape: Shape, id: str, purge: bool, kind: Any) -> Deleted:
    client = client_of(request)
    if not purge:
        message = "purge is false; an answer is deleted with all that is stored of it, or not at all"
        raise refuse("invalid_value", "purge", message)
    await erase(client, read_name(id, shape.prefix), id)
    return Deleted(id=id, object=kind)


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
        refused = refusal(failed("method_not_allowed", f"{request.method} is not served here; expected {allow}"))
        return _refused(Refusal(refused.status, refused.answer, ((b"allow", allow.encode()),)))
    if status == 413:
        limit = gateway_of(request).limits.max_msg_bytes
        return _refused(refusal(failed("payload_too_large", f"the body is over the limit of {limit} bytes")))
    if status == 400:
        return _refused(refusal(_bad_query(error)))
    return _on_unexpected(request, error)


def _nothing_at(path: str) -> str:
    what = not_served(path)
    return f"pdq does not serve {what}" if what else "there is nothing at this path"


def _bad_query(error: HTTPException) -> Failed:
    """Litestar's own detail would quote the URL."""
    wrong = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
    name, said = wrong.get("key", "query"), wrong.get("message", "it is not valid")
    return failed("invalid_value", f"{name} in the query: {said}", name)


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
    delete_chat_completion,
    delete_completion,
    *RESPONSES,
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
