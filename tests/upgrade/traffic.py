"""A constant stream of requests over HTTP, and what each must be answered with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import count, cycle
from typing import Any

import httpx
from msgspec.structs import replace

from tests.chaos import plan
from tests.chaos.plan import Ask
from tests.chaos.reference import body, reference
from tests.stack import MODEL

AT_ONCE = 6
BOUND_S = 60.0
"""How long one request may take before it counts as lost."""
AWAY_S = 0.05


class Asked:
    """One request, and what came of it. `request`: its id; empty: it was never accepted."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.request = ""
        self.error = ""
        self.answer: dict[str, Any] = {}

    @property
    def wrong(self) -> str:
        """What is wrong with it; empty: nothing."""
        if self.error:
            return self.error
        wanted = reference(replace(self.ask, request=self.request))
        choice, usage = self.answer["choices"][0], self.answer["usage"]
        text = choice["message"]["content"] if self.ask.shape == "chat" else choice["text"]
        got = (text, choice["finish_reason"], usage["completion_tokens"])
        right = (wanted.text, wanted.finish_reason, wanted.usage.completion_tokens)
        return "" if got == right else f"{got}, not {right}"


def asks(seed: int, orders: Collection[str]) -> Iterator[Ask]:
    """Without end: prompts and fields of a chaos run, with and without state over the output."""
    for number in count():
        for ask in plan.make(seed + number, 100, 1.0).asks:
            if ask.fields["max_tokens"] > 1 and ask.order in orders:
                yield ask


class Traffic:
    """`AT_ONCE` requests at any time, as long as the context lasts.

    A gateway that is not there, or goes without a byte of an answer, is passed over, as by a load balancer and by
    OpenAI's clients; no other failure is.

    `again`: how many were asked again after they were sent. That none of them had been taken is seen in the log.
    """

    def __init__(self, urls: Sequence[str], seed: int, orders: Collection[str] = plan.ORDERS) -> None:
        self.asked: list[Asked] = []
        self.again = 0
        self._urls = cycle(urls)
        self._asks = asks(seed, orders)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(AT_ONCE)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def more(self, requests: int) -> None:
        """Until so many more have ended."""
        wanted = self.ended + requests
        while self.ended < wanted:
            await asyncio.sleep(0.05)

    @property
    def ended(self) -> int:
        return sum(bool(one.answer or one.error) for one in self.asked)

    async def _ask_on(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=BOUND_S, limits=limits) as http:
            while not self._stop.is_set():
                asked = Asked(next(self._asks))
                self.asked.append(asked)
                try:
                    async with asyncio.timeout(BOUND_S):
                        await self._one(http, asked)
                except (httpx.HTTPError, TimeoutError) as exc:
                    asked.error = f"{type(exc).__name__} {exc}"

    async def _one(self, http: httpx.AsyncClient, asked: Asked) -> None:
        path = "/chat/completions" if asked.ask.shape == "chat" else "/completions"
        content = json.dumps({"model": MODEL, **json.loads(body(asked.ask))})
        headers = {"Pdq-Order": asked.ask.order, "Pdq-Priority": asked.ask.priority}
        while True:
            try:
                answer = await http.post(next(self._urls) + path, content=content, headers=headers)
                break
            except httpx.ConnectError:
                await asyncio.sleep(AWAY_S)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                self.again += 1
        asked.request = answer.headers.get("x-pdq-request", "")
        if answer.status_code == 200:
            asked.answer = answer.json()
        else:
            asked.error = f"{answer.status_code} {answer.text}"
