"""pdq over NATS as a target: what its own clients do."""

from __future__ import annotations

import asyncio

from pdq.bench.target import Api, Ask, Failed, Hearing
from pdq.client import Client, new_request_id
from pdq.log import Transcript
from pdq.messages import Event, State

SUBMIT_TIMEOUT_S = 5.0
GRACE_S = 5.0
"""Who asks has given up by then."""


class OverNats:
    """`model`: a slug. `order`, `priority`: of each request; empty: the router's choice."""

    def __init__(self, client: Client, model: str, api: Api, *, order: str = "", priority: str = "") -> None:
        self.api = api
        self.model = model
        self._client = client
        self._order = order
        self._priority = priority

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        """As `Target.ask`. Tokens are counted by the ids in the log."""
        request = hearing.request = new_request_id()
        transcript = Transcript()
        async with self._client.follow(request, catch_up=False) as follower:
            try:
                await self._client.submit(
                    ask.body,
                    model=self.model,
                    request=request,
                    deadline_s=ask.timeout_s,
                    priority=self._priority,
                    order=self._order,
                    timeout_s=min(SUBMIT_TIMEOUT_S, ask.timeout_s),
                )
                async for event in follower.events(ask.timeout_s + GRACE_S):
                    _take(event, transcript, hearing)
            except asyncio.CancelledError:
                await self._client.abandon(request)
                raise
        _check(transcript)


def _take(event: Event, transcript: Transcript, hearing: Hearing) -> None:
    if num := sum(len(piece.ids) for piece in transcript.feed(event)):
        hearing.chunk(num)
    state = event.state
    if state is not None and state.ended:
        hearing.end()
        if state.usage is not None:
            hearing.usage(state.usage.prompt_tokens, state.usage.completion_tokens)


def _check(transcript: Transcript) -> None:
    """Raises Failed unless the whole answer came."""
    state: State | None = transcript.state
    if state is not None and state.error is not None:
        raise Failed(state.error.code, state.error.message)
    if state is None or state.event != "finished":
        raise Failed(state.event if state is not None else "incomplete", "the request did not finish")
    if not transcript.complete():
        raise Failed("incomplete", "the answer that was heard is not whole")
