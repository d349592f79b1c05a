"""One response over HTTP: an `Exchange` whose answer is a response, or the events of one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from pdq.api.responses import StreamEvent
from pdq.api.responses_chat import renamed
from pdq.api.statuses import detail_of
from pdq.client import Client
from pdq.errors import PdqError
from pdq.messages import ErrorInfo
from pdq.telemetry import Span

from pdq_gateway.answering import Patience, Steps
from pdq_gateway.ask import not_found
from pdq_gateway.errors import Failed, info_of, refusal
from pdq_gateway.exchange import Exchange
from pdq_gateway.following import Following, Heard
from pdq_gateway.gateway import Gateway
from pdq_gateway.leaving import Receive, Send
from pdq_gateway.reply import KEEP_ALIVE, Reply, event
from pdq_gateway.responses_ask import ResponseAsk
from pdq_gateway.responses_making import Progress, encode, response_id
from pdq_gateway.responses_reading import read_progress
from pdq_gateway.shapes import CHAT


class ResponseExchange(Exchange):
    """An ASGI application of one request for a response, whose body has been read."""

    def __init__(self, gateway: Gateway, client: Client, wanted: ResponseAsk, span: Span | None = None) -> None:
        super().__init__(gateway, client, wanted.ask, CHAT, span)
        self._wanted = wanted
        self._progress = Progress(self._choices[0], gateway.models)
        self._last = wanted.ask.after.seqs[0] if wanted.ask.after is not None else -1
        """The number of the event that the client got last."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._wanted.store and self._choices[0].submitted:
                with contextlib.suppress(PdqError):
                    await self._client.purge(self._choices[0].request)

    # ---- the answer

    async def _answer(self, reply: Reply, logs: Following, steps: Steps, rest: Sequence[Heard]) -> None:
        begun = self._progress.begin()
        patience = Patience(logs, self._choices, self._gateway.settings.keep_alive_s)
        if self._wanted.at_once:
            await self._queued(reply)
        elif self._ask.stream:
            await self._stream(reply, begun, rest, patience)
        else:
            await self._whole(reply, rest, patience)

    async def _queued(self, reply: Reply) -> None:
        """As it is now: under an idempotency key it may have been asked for long ago."""
        known = await read_progress(self._client, self._gateway, self._ask.name.request) if self._ask.named else None
        await reply.whole(encode((known or self._progress).response(self._wanted.asked)))

    async def _whole(self, reply: Reply, heard: Sequence[Heard], patience: Patience) -> None:
        """Raises Failed when it ends otherwise than with its answer."""
        while True:
            for _, found in heard:
                self._progress.take(found)
            if self._progress.ended:
                break
            heard = await patience.next()
        if self._progress.error is not None:
            raise self._progress.error
        await reply.whole(encode(self._progress.response(self._wanted.asked)))

    async def _stream(
        self, reply: Reply, begun: Sequence[StreamEvent], heard: Sequence[Heard], patience: Patience
    ) -> None:
        """What it ends with is an event too."""
        await reply.begin_stream()
        frames = self._frames(begun)
        while True:
            for _, found in heard:
                frames += self._frames(self._progress.take(found))
            if self._progress.ended:
                break
            if frames:
                await reply.stream(frames)
            frames = b""
            while not (heard := await patience.next()):
                await reply.stream(KEEP_ALIVE)
        await reply.end_stream(frames)

    def _frames(self, events: Sequence[StreamEvent]) -> bytes:
        """Those of them that the client does not have."""
        new = [each for each in events if each.sequence_number > self._last]
        if not new:
            return b""
        self._last = new[-1].sequence_number
        return b"".join(event(encode(each), str(each.sequence_number), each.type) for each in new)

    # ---- what is wrong

    async def _refuse(self, reply: Reply, error: PdqError) -> None:
        info = renamed(info_of(error))
        if reply.status:
            await reply.end_stream(event(encode(self._error_event(info)), type="error"))
        else:
            await reply.refuse(refusal(Failed(info)))

    def _error_event(self, info: ErrorInfo) -> dict[str, Any]:
        """The gateway's own word, and not the log's: whoever goes on after its number misses nothing."""
        told = {"code": info.code, "message": info.message, "param": info.param}
        return {"type": "error", "sequence_number": max(0, self._last), **told, "error": detail_of(info)}

    def _not_found(self) -> Exception:
        return not_found(response_id(self._ask.name.request))

    def _note_usage(self) -> None:
        if self._wanted.at_once:
            self._note_end("queued")
        elif self._progress.error is not None:
            self._note_failure(self._progress.error)
        else:
            super()._note_usage()
