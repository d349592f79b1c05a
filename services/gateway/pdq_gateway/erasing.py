"""Removing what is kept of an answer."""

from __future__ import annotations

import asyncio

from pdq.client import Client

from pdq_gateway.ask import not_found
from pdq_gateway.errors import Failed
from pdq_gateway.naming import Name


async def erase(client: Client, name: Name, public: str) -> None:
    """End an answer's requests and remove all that is stored of them. Raises Unavailable; Failed: `unavailable` where
    it may be half done, `not_found` where there was nothing. `public`: the id that clients know."""
    replies = await asyncio.gather(*(client.purge(request) for request in name.requests))
    errors = [reply.error for reply in replies if reply.error is not None]
    for error in errors:
        if error.code != "not_found":
            raise Failed(error)
    if len(errors) == len(replies):
        raise not_found(public)
