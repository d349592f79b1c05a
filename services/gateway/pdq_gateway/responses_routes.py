"""The routes of `/v1/responses`."""

from __future__ import annotations

from litestar import delete, get, post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from pdq.api import responses
from pdq.api.refusals import refuse

from pdq_gateway.erasing import erase
from pdq_gateway.intake import Http, body_of, check_media_type, client_of, gateway_of
from pdq_gateway.naming import Name
from pdq_gateway.responses_answer import ResponseExchange
from pdq_gateway.responses_ask import read_again, read_response_ask
from pdq_gateway.responses_making import encode
from pdq_gateway.responses_reading import cancel_response, read_response

PATH = "/v1/responses"


@post(PATH, status_code=200)
async def create_response(request: Http) -> ASGIApp:
    gateway, client = gateway_of(request), client_of(request)
    check_media_type(request)
    wanted = read_response_ask(await body_of(request), request.headers, gateway.models)
    gateway.refused.check(client.tenant)
    name, headers = wanted.ask.name.request, dict(request.headers)
    span = gateway.telemetry.submit(name, client.tenant, wanted.ask.model, headers)
    return ResponseExchange(gateway, client, wanted, span)


@get(PATH + "/{id:str}")
async def get_response(
    request: Http,
    id: str,
    stream: bool = False,
    starting_after: int | None = None,
    include_obfuscation: bool = False,
) -> ASGIApp:
    gateway, client = gateway_of(request), client_of(request)
    if include_obfuscation:
        raise refuse("unsupported", "include_obfuscation", "include_obfuscation is not served")
    wanted = read_again(id, request.headers, starting_after=starting_after, stream=stream)
    if stream:
        return ResponseExchange(gateway, client, wanted)
    name = wanted.ask.name.request
    return _told(name, await read_response(client, gateway, name))


@post(PATH + "/{id:str}/cancel", status_code=200)
async def post_cancel(request: Http, id: str) -> ASGIApp:
    gateway, client = gateway_of(request), client_of(request)
    name = read_again(id, {}).ask.name.request
    return _told(name, await cancel_response(client, gateway, name))


@delete(PATH + "/{id:str}", status_code=200)
async def delete_response(request: Http, id: str) -> ASGIApp:
    client = client_of(request)
    name = read_again(id, {}).ask.name.request
    await erase(client, Name(name), id)
    return _told(name, responses.ResponseDeleted(id=id))


RESPONSES = [create_response, get_response, post_cancel, delete_response]


def _told(name: str, what: responses.Response | responses.ResponseDeleted) -> ASGIApp:
    return ASGIResponse(body=encode(what), media_type="application/json", headers={"x-pdq-request": name})
