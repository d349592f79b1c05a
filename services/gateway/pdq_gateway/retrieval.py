"""An answer asked for by its id, as far as the log has it."""

from __future__ import annotations

from typing import Any

from pdq.client import Client
from pdq.errors import PdqError

from pdq_gateway.answering import head_of
from pdq_gateway.ask import Ask, not_found
from pdq_gateway.errors import refusal
from pdq_gateway.gateway import Gateway
from pdq_gateway.leaving import Receive, Send
from pdq_gateway.progress import Choice, usage_of
from pdq_gateway.reply import Reply
from pdq_gateway.shapes import Shape

PAGE = 1_000


class Retrieval:
    """An ASGI application of one request: 200 and the answer, or the error that it ended with; 202 while it has not
    ended, with its `status` and no choices."""

    def __init__(self, gateway: Gateway, client: Client, ask: Ask, shape: Shape) -> None:
        self._gateway = gateway
        self._client = client
        self._ask = ask
        self._shape = shape

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        name = self._ask.name
        reply = Reply(send, [(b"x-pdq-request", name.request.encode())], self._gateway.settings.stall_s)
        choices = [Choice(index, request) for index, request in enumerate(name.requests)]
        try:
            for choice in choices:
                await self._read(choice)
            await self._answer(reply, choices)
        except PdqError as exc:
            await reply.refuse(refusal(exc))

    async def _read(self, choice: Choice) -> None:
        """Raises Failed for a request that the log does not know, and for one that ended otherwise than finished."""
        more = True
        while more:
            page = await self._client.read(choice.request, after=choice.transcript.seq, limit=PAGE)
            for event in page.events:
                choice.take(event)
            more = page.more
        if choice.state is None:
            raise not_found(self._ask.name.public(self._shape.prefix))

    async def _answer(self, reply: Reply, choices: list[Choice]) -> None:
        head = head_of(self._gateway, self._ask, self._shape, choices[0])
        if all(choice.ended for choice in choices):
            await reply.whole(self._shape.whole(head, choices, usage_of(choices)))
            return
        started = any(choice.transcript.attempt for choice in choices)
        await reply.whole(self._shape.unfinished(head, started), 202, [(b"retry-after", b"1")])
