"""Responses that were asked for before: reading, cancelling and removing them by their id."""

from __future__ import annotations

from pdq.api.responses import Response
from pdq.client import Client

from pdq_gateway.ask import not_found
from pdq_gateway.errors import Failed
from pdq_gateway.gateway import Gateway
from pdq_gateway.progress import Choice
from pdq_gateway.responses_making import Progress, response_id

PAGE = 1_000


async def read_progress(client: Client, gateway: Gateway, request: str) -> Progress:
    """A response as far as the log has it. Raises Failed where it has nothing of it, and Unavailable."""
    choice = Choice(0, request)
    progress, more = Progress(choice, gateway.models), True
    while more:
        page = await client.read(request, after=choice.transcript.seq, limit=PAGE)
        for event in page.events:
            progress.take(event)
        more = page.more
    if choice.state is None:
        raise not_found(response_id(request))
    return progress


async def read_response(client: Client, gateway: Gateway, request: str) -> Response:
    """Raises as `read_progress`."""
    return (await read_progress(client, gateway, request)).response()


async def cancel_response(client: Client, gateway: Gateway, request: str) -> Response:
    """End it, and read it; one that has ended stays as it is. Raises as `read_progress`."""
    reply = await client.cancel(request)
    if reply.state is None:
        if reply.error is not None and reply.error.code != "not_found":
            raise Failed(reply.error)
        raise not_found(response_id(request))
    return await read_response(client, gateway, request)
