"""A response as its log makes it, and the events that tell of it. Pure: the same log gives the same bytes anywhere.

`sequence_number` counts the events that the log's records make, from 0 and in the log's order. So it is the same at
every gateway, live or read later, and whoever has one can go on after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from pdq.api.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    Status,
    StreamEvent,
)
from pdq.api.responses_chat import renamed
from pdq.api.statuses import status_of
from pdq.messages import ErrorInfo, Event, State
from pdq.settings import Models

from pdq_gateway.errors import Failed
from pdq_gateway.progress import Choice, Step
from pdq_gateway.responses_items import Items

PREFIX = "resp_"


def response_id(request: str) -> str:
    return PREFIX + request


encode = msgspec.json.Encoder().encode


class Making:
    """Take each event of the log, in order. `public`: a model's public id, by what the log calls it."""

    def __init__(self, request: str, public: Callable[[str], str]) -> None:
        self._request = request
        self._public = public
        self._next: Callable[[], int] = itertools.count().__next__
        self._items = Items(request, self._next)
        self._created = False
        self._started = False
        self._error: ResponseError | None = None

    def take(self, state: State, step: Step) -> Iterator[StreamEvent]:
        """`state`: the newest there is, this event's included. `step`: what the event adds."""
        yield from self.begin(state)
        for piece in step.pieces:
            yield from self._items.add(piece)
        if state.ended:
            cut = state.finish_reason == "length"
            yield from self._items.end(cut)
            yield self._event("response.incomplete" if cut else "response.completed", state)

    def fail(self, state: State, error: ErrorInfo) -> Iterator[StreamEvent]:
        """The request has ended otherwise than with its answer."""
        yield from self.begin(state)
        self._error = _error(renamed(error))
        yield from self._items.end(cut=True)
        yield self._event("response.failed", state)

    def response(self, state: State, asked: Mapping[str, Any] | None = None) -> Response:
        """The response as far as it is. `asked`: what was asked for, where that is known (`responses_ask.asked`)."""
        status = self._status(state)
        return Response(
            id=response_id(self._request),
            created_at=int(state.submitted or state.at),
            completed_at=int(state.at) if status == "completed" else None,
            status=status,
            error=self._error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            model=self._public(state.model),
            output=self._items.output(),
            max_output_tokens=state.max_tokens or None,
            usage=self._usage(state),
            **(asked or {}),
        )

    def begin(self, state: State) -> Iterator[StreamEvent]:
        """What a state tells before there is output."""
        if state.order and not self._created:
            self._created = True
            yield self._event("response.created", state)
        if _is_started(state) and not self._started:
            self._started = True
            yield self._event("response.in_progress", state)

    def _event(
        self,
        type: Literal[
            "response.created",
            "response.in_progress",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
        state: State,
    ) -> ResponseEvent:
        return ResponseEvent(type=type, sequence_number=self._next(), response=self.response(state))

    def _status(self, state: State) -> Status:
        if self._error is not None:
            return "cancelled" if state.event == "cancelled" else "failed"
        if state.ended:
            return "incomplete" if state.finish_reason == "length" else "completed"
        return "in_progress" if _is_started(state) else "queued"

    def _usage(self, state: State) -> ResponseUsage | None:
        if state.usage is None:
            return None
        cached = state.kv.loaded_tokens + state.kv.local_tokens if state.kv is not None else 0
        return ResponseUsage(
            input_tokens=state.usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=min(cached, state.usage.prompt_tokens)),
            output_tokens=state.usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._items.num_reasoning_tokens),
            total_tokens=state.usage.total_tokens,
        )


class Progress:
    """A response that is read from its log, of one choice. Each event is taken once, by it or by the choice."""

    def __init__(self, choice: Choice, models: Models) -> None:
        self._choice = choice
        self._making = Making(choice.request, partial(_public, models))
        self.error: Failed | None = None
        """What it ended with, if not with its answer."""

    @property
    def ended(self) -> bool:
        return self._choice.ended

    def begin(self) -> list[StreamEvent]:
        """The choice has taken all up to its route."""
        return list(self._making.begin(self._state))

    def take(self, found: Event) -> list[StreamEvent]:
        """Raises Failed where the log is another request's."""
        try:
            step = self._choice.take(found)
        except Failed as exc:
            if not self.ended:
                raise
            self.error = exc
            return list(self._making.fail(self._state, exc.info))
        return list(self._making.take(self._state, step))

    def response(self, asked: Mapping[str, Any] | None = None) -> Response:
        """As `Making.response`."""
        return self._making.response(self._state, asked)

    @property
    def _state(self) -> State:
        assert self._choice.state is not None
        return self._choice.state


def _public(models: Models, slug: str) -> str:
    spec = models.find(slug)
    return spec.id if spec is not None else slug


def _is_started(state: State) -> bool:
    """Whether a worker has had it."""
    return bool(state.prefill.attempt or state.decode.attempt)


def _error(error: ErrorInfo) -> ResponseError:
    status = status_of(error.code)
    kind: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
    if status == 429:
        kind = "rate_limit_exceeded"
    elif 400 <= status < 499:
        kind = "invalid_prompt"
    return ResponseError(code=kind, message=error.message, param=error.param, type=error.code)
