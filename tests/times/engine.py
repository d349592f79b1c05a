"""A worker whose engine is watched from outside."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.stack import Service, Stack

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.005
CLOCKS_S = 0.01


class Watched(Service):
    """A worker service that writes down when its engine is busy (`tests.times.probe`)."""

    @property
    def changes_file(self) -> Path:
        return self.log.with_suffix(".busy")

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.times.probe", str(self.changes_file), self.module]
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=out, stderr=out)

    def busy_at(self, when: float) -> bool:
        """Whether the engine was busy at a time, in Unix seconds."""
        before = [busy for at, busy in self._changes() if at <= when]
        return bool(before and before[-1])

    async def until_busy(self, seconds: float) -> None:
        await self._until(lambda: self.busy_at(time.time()), seconds)

    async def idle_after(self, when: float, seconds: float) -> float:
        """The first moment from `when` on at which the engine was idle. Raises AssertionError when it was idle before.

        A timer may be early by a moment, as its clock is another one: that counts as `when`.
        """
        early = when - CLOCKS_S
        assert self.busy_at(early), f"{self.module} was idle already"
        found: list[float] = []

        def idle() -> bool:
            found[:] = [at for at, busy in self._changes() if at > early and not busy]
            return bool(found)

        await self._until(idle, seconds)
        return max(when, found[0])

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(POLL_S)

    def _changes(self) -> list[tuple[float, bool]]:
        if not self.changes_file.exists():
            return []
        lines = self.changes_file.read_text().splitlines()
        return [(float(at), busy == "1") for at, _, busy in (line.partition(" ") for line in lines)]


def add_watched(stack: Stack, module: str, **settings: str) -> Watched:
    """As `Stack.add`."""
    service = Watched(module, stack.directory, stack.environment(f"{module}-{len(stack.services)}", **settings))
    stack.services.append(service)
    return service
