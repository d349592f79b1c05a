"""One request over HTTP, from its submit to the end of its answer.

Headers go out only when the request is routed, so that whatever is wrong with it has a status of its own. An error
after that is the last event of the stream. A client that leaves cancels its request, unless it asked for background;
a gateway that stops cancels nothing: another goes on from the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from pdq.client import Client
from pdq.errors import NewerVersion, PdqError, Unavailable
from pdq.telemetry import Span

from pdq_gateway.answering import GRACE_S, Answer, Steps
from pdq_gateway.ask import Ask, not_found
from pdq_gateway.errors import refusal
from pdq_gateway.following import Following, Heard, following
from pdq_gateway.gateway import Gateway
from pdq_gateway.leaving import ClientLeft, Receive, Send, Stopping, while_wanted
from pdq_gateway.progress import Choice, Step, usage_of
from pdq_gateway.reply import Reply
from pdq_gateway.shapes import Shape

SUBMIT_TIMEOUT_S = 5.0
ABANDON_TIMEOUT_S = 10.0
"""In which a router must take the cancel of a client that left: time for one to be started again."""


class Exchange:
    """An ASGI application of one request, whose body has been read."""

    def __init__(self, gateway: Gateway, client: Client, ask: Ask, shape: Shape, span: Span | None = None) -> None:
        """`span`: that of a submit; an answer that is only read has none."""
        self._gateway = gateway
        self._client = client
        self._ask = ask
        self._shape = shape
        self._span = span
        self._trace = span.headers() if span is not None else {}
        self._choices = [
            Choice(index, request, ask.bodies[index] if ask.bodies else None)
            for index, request in enumerate(ask.name.requests)
        ]

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._headers(), self._gateway.settings.stall_s)
        with self._span or contextlib.nullcontext():
            try:
                await while_wanted(self._serve(reply), receive, lambda: reply.complete, self._gateway.over)
            except ClientLeft:
                self._note_end("cancelled")
                if not self._ask.background:
                    await self._give_up()
            except Stopping as exc:
                self._note_end("drain")
                # A stream breaks off: what would end it in order would pass for the end of the answer.
                if not reply.status:
                    await self._refuse(reply, exc)
            except PdqError as exc:
                self._gateway.refused.note(self._client.tenant, exc)
                self._note_failure(exc)
                with contextlib.suppress(ClientLeft):
                    await self._refuse(reply, exc)
                if self._is_lost(exc):
                    await self._give_up()

    # ---- the answer

    async def _serve(self, reply: Reply) -> None:
        ask = self._ask
        known = ask.named or not ask.bodies
        missing = await self._missing() if known else self._choices
        bound_s = self._gateway.limits.max_deadline_s + GRACE_S
        async with following(self._client, ask.name.requests, catch_up=known, bound_s=bound_s) as logs:
            await self._submit(missing)
            steps, rest = await self._until_routed(logs)
            await self._answer(reply, logs, steps, rest)
        self._note_usage()

    async def _answer(self, reply: Reply, logs: Following, steps: Steps, rest: Sequence[Heard]) -> None:
        answer = Answer(self._gateway, self._ask, self._shape, self._choices, logs)
        if self._ask.stream:
            await answer.stream(reply, steps, rest)
        else:
            await answer.whole(reply, rest)

    async def _refuse(self, reply: Reply, error: PdqError) -> None:
        await reply.refuse(refusal(error))

    def _not_found(self) -> Exception:
        return not_found(self._ask.name.public(self._shape.prefix))

    async def _missing(self) -> list[Choice]:
        """The choices that the log does not have. Raises Failed where it must have them, or has others."""
        kept = self._ask.after is not None or not self._ask.bodies
        missing = []
        for choice in self._choices:
            try:
                page = await self._client.read(choice.request, limit=1)
            except Unavailable:
                if kept:
                    raise
                # Submitted all the same, to be kept while no router answers: a name is accepted once.
                return self._choices
            if page.events:
                choice.check_own(page.events[0].state)
            else:
                missing.append(choice)
        if missing and kept:
            raise self._not_found()
        return missing

    async def _submit(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            choice.submitted = True
            await self._client.submit(
                self._ask.bodies[choice.index],
                model=self._ask.model,
                request=choice.request,
                headers=self._ask.headers | self._trace,
                timeout_s=SUBMIT_TIMEOUT_S,
            )

    async def _until_routed(self, logs: Following) -> tuple[Steps, list[Heard]]:
        """Until each choice is routed: the steps so far, and what was heard beyond them.

        Raises Failed with what is wrong with the request, and when no router takes it in time.
        """
        steps: list[tuple[Choice, Step]] = []
        give_up = time.monotonic() + self._gateway.settings.accept_s
        heard: list[Heard] = []
        while not all(choice.opened for choice in self._choices):
            if not heard:
                heard = await logs.next(max(0.0, give_up - time.monotonic()))
            if not heard:
                within = f"{self._gateway.settings.accept_s:g} s"
                raise Unavailable(
                    f"no router has taken the request within {within}: is one running, and the uplink up, at a site?"
                )
            index, found = heard.pop(0)
            steps.append((self._choices[index], self._choices[index].take(found)))
        return steps, heard

    # ---- its end

    def _is_lost(self, error: PdqError) -> bool:
        """Whether nobody will ask for what may still run. A client tries again what is `unavailable`, or newer than
        this build; under an idempotency key it then finds this very request."""
        if isinstance(error, Unavailable | NewerVersion):
            return not self._ask.named and not self._ask.background
        return error.code != "duplicate_id"

    async def _give_up(self) -> None:
        """Cancel what was submitted here or, under a key, is known to be ours."""
        mine = [choice for choice in self._choices if self._ask.bodies and choice.mine(self._ask.named)]
        await asyncio.gather(*(self._client.abandon(choice.request, ABANDON_TIMEOUT_S) for choice in mine))

    def _headers(self) -> list[tuple[bytes, bytes]]:
        own = {"x-pdq-request": self._ask.name.request, **self._trace}
        return [(name.encode(), value.encode()) for name, value in own.items()]

    def _note_end(self, outcome: str) -> None:
        if self._span is not None:
            self._span.end(outcome)

    def _note_failure(self, error: PdqError) -> None:
        if self._span is not None:
            self._span.fail(error.code)

    def _note_usage(self) -> None:
        reasons = {choice.state.finish_reason for choice in self._choices if choice.state is not None}
        if self._span is not None:
            self._span.set_usage(usage_of(self._choices), ",".join(sorted(reasons)))
