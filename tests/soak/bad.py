"""Requests that can only fail: each must end once, as `failed` with its code, with a dead letter where one is due."""

from __future__ import annotations

from contextlib import aclosing

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.messages import Event

from tests.chaos.asking import until_it_works
from tests.soak.load import Bad
from tests.stack import MODEL, completion

UNREADABLE = b'{"prompt": [1, 2'
REFUSED = completion([1, 2, 3], temperature=9)
GARBAGE = b"\x93garbage"
DEAD_STAGE = {"unreadable": "route", "job": "decode"}
"""Kinds that leave a dead letter, and its stage. What clients can mend themselves leaves none."""


class BadRequests:
    """Asks for what must fail, as one tenant. `bus`: an operator's, which may publish jobs and read dead letters."""

    def __init__(self, client: Client, bus: Bus, bound_s: float) -> None:
        self._client = client
        self._bus = bus
        self._bound_s = bound_s

    async def run(self, bad: Bad) -> list[str]:
        """Returns what is wrong. Raises what the client raises."""
        match bad.kind:
            case "unreadable":
                return await self._submitted(bad, UNREADABLE, "invalid_json")
            case "refused":
                return await self._submitted(bad, REFUSED, "invalid_value")
            case "taken":
                return await self._taken(bad)
            case "job":
                return await self._job(bad)

    async def _submitted(self, bad: Bad, body: bytes, code: str) -> list[str]:
        request = new_request_id()
        await self._client.submit(body, model=MODEL, request=request)
        return await self._failed(bad, request, code)

    async def _taken(self, bad: Bad) -> list[str]:
        """Another body under an id that is taken fails under its sequence's name; the first is answered."""
        request = new_request_id()
        await self._client.submit(completion([1, 2], max_tokens=2, ignore_eos=True), model=MODEL, request=request)
        second = await self._client.submit(completion([3, 4], max_tokens=2), model=MODEL, request=request)
        found = await self._failed(bad, f"s-{second.seq}", "duplicate_id")
        events = await self._events(request)
        made = sum(len(event.out.token_ids()) for event in events if event.out is not None)
        if _ends(events) != [("finished", "")] or made != 2:
            found.append(f"{bad.kind}: the first body's request {request} ended {_ends(events)} after {made} tokens")
        return found

    async def _job(self, bad: Bad) -> list[str]:
        request = new_request_id()
        await self._bus.publish(subjects.job("decode", MODEL, "normal", self._client.tenant, request), GARBAGE)
        return await self._failed(bad, request, "not_decodable")

    async def _failed(self, bad: Bad, request: str, code: str) -> list[str]:
        events = await self._events(request)
        found = []
        if _ends(events) != [("failed", code)] or any(event.out is not None for event in events):
            found.append(f"{bad.kind}: {request} ended {_ends(events)}, not once as failed with {code}")
        stage = DEAD_STAGE.get(bad.kind, "route")
        subject = subjects.dead(stage, MODEL, self._client.tenant, request)
        letter = await until_it_works(lambda: self._bus.last(subjects.DEAD, subject))
        if (letter is not None) != (bad.kind in DEAD_STAGE):
            found.append(f"{bad.kind}: {request} has {'a' if letter else 'no'} dead letter")
        return found

    async def _events(self, request: str) -> list[Event]:
        async with self._client.follow(request) as follower, aclosing(follower.events(self._bound_s)) as events:
            return [event async for event in events]


def _ends(events: list[Event]) -> list[tuple[str, str]]:
    ends = [event.state for event in events if event.state is not None and event.state.ended]
    return [(end.event, end.error.code if end.error else "") for end in ends]
