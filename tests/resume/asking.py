"""The client of one stream: it reads, leaves, comes back anywhere, and goes on after the last event that it has."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

import httpx
import msgspec
from pdq.client import idempotent_id

from tests import sse
from tests.resume.plan import Ask, How, Return
from tests.resume.told import DONE, Told

RETRY_S = 0.2
CANCELLED_S = 30.0
"""Once its client has left, a request must end within that."""
FOR_NOW = frozenset({429, 503})

Outcome = Literal["done", "cut", "broken", "refused"]


class Leg(msgspec.Struct, frozen=True):
    """One connection."""

    how: How
    gateway: int
    events: int
    outcome: Outcome


class Asked:
    """What came of one request, as its client saw it."""

    def __init__(self, ask: Ask, size: int = 0) -> None:
        """size: characters of its whole answer, where that is known."""
        self.ask = ask
        self.size = size
        self.frames: list[sse.Frame] = []
        self.told = Told()
        self.legs: list[Leg] = []
        self.gateway = ask.gateway
        """Where it is asked just now."""
        self.before = 0
        """Events that it had before this connection."""
        self.lost_decode = False
        """Its worker was killed in mid-answer."""
        self.over = False
        self.error = ""
        """Why its client gave up, if it did."""

    @property
    def share(self) -> float:
        """Of its answer that is here, 0 to 1."""
        return 1.0 if self.over else min(1.0, self.told.size / self.size) if self.size else 0.0

    @property
    def place(self) -> str:
        """Where it goes on: the id of the last event that it has."""
        return next((frame.id for frame in reversed(self.frames) if frame.id), "")

    @property
    def public(self) -> str:
        """Its answer's id, as it follows from the key."""
        count = self.ask.body.get("n", 1)
        prefix = "cmpl" if self.ask.path == "/completions" else "chatcmpl"
        return f"{prefix}-{idempotent_id(self.ask.key)}" + (f"-n{count}" if count > 1 else "")

    @property
    def requests(self) -> list[str]:
        """The ids of its choices."""
        name = idempotent_id(self.ask.key)
        return [f"{name}-{index}" if index else name for index in range(self.ask.body.get("n", 1))]

    def take(self, frame: sse.Frame) -> None:
        self.frames.append(frame)
        self.told.take(frame)

    def count(self, outcome: Outcome) -> int:
        """Connections that gave something, and ended so."""
        return sum(leg.outcome == outcome and leg.events > 0 for leg in self.legs)


class Broken(Exception):
    """An answer that is an error for good, or no stream at all."""


class Asker:
    """Runs requests against gateways. `bound_s`: how long one may take, all its connections together.

    `quiet`: nobody kills anything while it is held.
    """

    def __init__(self, urls: Sequence[str], bound_s: float, quiet: asyncio.Lock | None = None) -> None:
        self._urls = urls
        self._bound_s = bound_s
        self._quiet = quiet or asyncio.Lock()

    async def run(self, asked: Asked) -> None:
        """Never raises, but notes what went wrong."""
        try:
            async with asyncio.timeout(self._bound_s), httpx.AsyncClient(timeout=self._bound_s) as http:
                await (self._follow(http, asked) if asked.ask.leaves is None else self._leave(http, asked))
        except TimeoutError:
            asked.error = f"not done within {self._bound_s:g} s"
        except (Broken, httpx.HTTPError, AssertionError) as exc:
            asked.error = f"{type(exc).__name__}: {exc}"
        asked.over = True

    async def whole(self, asked: Asked) -> list[sse.Frame]:
        """The stream from its beginning, read again."""
        async with httpx.AsyncClient(timeout=self._bound_s) as http:
            answer = await http.get(self._url(asked, Return("get", 0)))
        return [frame for frame in sse.frames(answer.content) if not frame.comment]

    async def _follow(self, http: httpx.AsyncClient, asked: Asked) -> None:
        back = Return("post", asked.ask.gateway)
        while asked.count("done") == 0:
            # Before its first event it has nothing to go on after.
            back = back if asked.place else Return("post", back.gateway)
            asked.gateway, asked.before = back.gateway, len(asked.frames)
            outcome = await self._leg(http, asked, back)
            asked.legs.append(Leg(back.how, back.gateway, len(asked.frames) - asked.before, outcome))
            if outcome in ("broken", "refused"):
                await asyncio.sleep(RETRY_S)
            back = asked.ask.returns[(len(asked.legs) - 1) % len(asked.ask.returns)]

    async def _leg(self, http: httpx.AsyncClient, asked: Asked, back: Return) -> Outcome:
        try:
            async with self._stream(http, asked, back) as answer:
                if answer.status_code != 200:
                    return _refused(await answer.aread())
                return await self._read(answer, asked)
        except httpx.TransportError:
            return "broken"

    async def _read(self, answer: httpx.Response, asked: Asked) -> Outcome:
        cut = next((share for share in asked.ask.cuts if share > asked.share), 2.0)
        leaves = math.inf if asked.ask.leaves is None else asked.ask.leaves
        async with aclosing(_events(answer)) as events:
            async for frame in events:
                if frame.data.startswith('{"error"'):
                    return _refused(frame.data.encode())
                asked.take(frame)
                if frame.data == DONE:
                    return "done"
                if asked.share >= cut or asked.told.size >= leaves:
                    return "cut"
        raise Broken("a stream that ended in order, but without [DONE]")

    async def _leave(self, http: httpx.AsyncClient, asked: Asked) -> None:
        """Read a little and go; then see the request end for that."""
        async with self._quiet:
            while await self._leg(http, asked, Return("post", asked.ask.gateway)) in ("broken", "refused"):
                await asyncio.sleep(RETRY_S)
            async with asyncio.timeout(CANCELLED_S):
                await self._cancelled(http, asked)

    async def _cancelled(self, http: httpx.AsyncClient, asked: Asked) -> None:
        url = self._urls[1 - asked.ask.gateway] + f"{asked.ask.path}/{asked.public}"
        while (answer := await http.get(url)).status_code == 202:
            await asyncio.sleep(RETRY_S)
        if answer.status_code != 499:
            raise Broken(f"its client left, and it ended with {answer.status_code}: {answer.text[:200]}")

    @asynccontextmanager
    async def _stream(self, http: httpx.AsyncClient, asked: Asked, back: Return) -> AsyncIterator[httpx.Response]:
        headers = {"Last-Event-ID": asked.place} if asked.place else {}
        if back.how == "get":
            call: dict[str, Any] = {"method": "GET", "headers": headers}
        else:
            own = {"Idempotency-Key": asked.ask.key, "Pdq-Order": asked.ask.order}
            own |= {"Pdq-Background": "true"} if asked.ask.background else {}
            call = {"method": "POST", "headers": headers | own, "json": asked.ask.body}
        async with http.stream(url=self._url(asked, back), **call) as answer:
            yield answer

    def _url(self, asked: Asked, back: Return) -> str:
        url = self._urls[back.gateway] + asked.ask.path
        if back.how == "post":
            return url
        usage = "true" if "stream_options" in asked.ask.body else "false"
        return f"{url}/{asked.public}?stream=true&include_usage={usage}"


async def _events(answer: httpx.Response) -> AsyncGenerator[sse.Frame, None]:
    async for frame in sse.read(answer):
        if not frame.comment:
            yield frame


def _refused(body: bytes) -> Outcome:
    """Raise Broken for an error that another try would bring again."""
    error = json.loads(body)["error"]
    if error["code"] != "unavailable":
        raise Broken(f"{error['code']}: {error['message']}")
    return "refused"
