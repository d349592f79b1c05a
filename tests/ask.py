"""Submit a request and follow it to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from pdq.client import Client, new_request_id
from pdq.log import Transcript
from pdq.messages import Event

from tests.stack import MODEL, Stack


class Answer:
    """A request, all its events in order, and what they amount to."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.events: list[Event] = []
        self.transcript = Transcript()

    def take(self, event: Event) -> None:
        self.events.append(event)
        self.transcript.feed(event)

    @property
    def state(self) -> Any:
        """The newest state; Any, so that tests read its optional fields without asserting each."""
        return self.transcript.state

    @property
    def story(self) -> list[str]:
        """The state events, in order."""
        return [event.state.event for event in self.events if event.state is not None]

    @property
    def terminal(self) -> list[str]:
        return [event.state.event for event in self.events if event.state is not None and event.state.ended]

    @property
    def num_writes(self) -> int:
        return sum(event.out is not None for event in self.events)


async def ask(client: Client, body: bytes, *, seconds: float = 30, **options: Any) -> Answer:
    """Follow, submit, and read until the end; the answer is checked to be complete."""
    answer = Answer(options.pop("request", None) or new_request_id())
    options.setdefault("model", MODEL)
    async with client.follow(answer.request, catch_up=False) as follower:
        await client.submit(body, request=answer.request, **options)
        async for event in follower.events(seconds):
            answer.take(event)
    assert answer.transcript.complete(), answer.events
    return answer


async def refused(client: Client, body: bytes, **options: Any) -> Answer:
    """As `ask`, for a request that must fail: exactly one terminal event, `failed`, and no token."""
    answer = await ask(client, body, **options)
    assert answer.terminal == ["failed"]
    assert answer.num_writes == 0
    return answer


async def follow_to_end(client: Client, request: str, seconds: float = 60) -> Answer:
    """All events of a request that was submitted before."""
    answer = Answer(request)
    async with client.follow(request) as follower:
        async for event in follower.events(seconds):
            answer.take(event)
    return answer


def submit_command(stack: Stack, **settings: str) -> tuple[int, str]:
    """`pdq submit`: its exit code, and what it says on stderr."""
    home = str(stack.directory / "home")
    environment = {"PATH": os.environ["PATH"], "PDQ_NATS_URL": stack.url, "PDQ_HOME": home, **settings}
    command = [sys.executable, "-m", "pdq", "submit", "--model", MODEL, "hello"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


async def read_all(client: Client, request: str, after: int = 0) -> Answer:
    """What the read endpoint holds of a request."""
    answer = Answer(request)
    while True:
        page = await client.read(request, after=answer.transcript.seq or after, limit=100)
        for event in page.events:
            answer.take(event)
        if not page.more:
            return answer
