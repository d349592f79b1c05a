"""Plays KEDA and Kubernetes over real workers: the scaler's number starts processes, and SIGTERM ends them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
from pdq.messages import StageName

from tests.scaling.keda import Number, Replicas, Scaled
from tests.stack import Stack

STARTED = "msg=started"
"""In the log of a worker that handles signals."""
EXIT_S = 30.0
"""How long a worker may take to end after SIGTERM."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one role."""

    at_s: float
    """Seconds since the driver began."""
    role: StageName
    lag: float | None
    """The scaler's number, of all its triggers; None: there was none."""
    replicas: int
    """Wanted, as of this look."""
    processes: int
    """Alive, those that are ending among them."""


class Deployment:
    """The workers of a role. Nothing but SIGTERM ends one, unless it ends by itself."""

    def __init__(self, stack: Stack, role: StageName, *, idle_exit_s: float = 0.0, **settings: str) -> None:
        self.role: StageName = role
        self.ended: list[int | None] = []
        """Exit codes; None: it had to be killed. 0, too, of one that was told to end before it ran code of ours."""
        self.started = 0
        self._stack = stack
        self._options = ["--role", role, "--idle-exit", f"{idle_exit_s:g}"]
        self._settings = settings
        self._running: list[_Worker] = []
        self._ending: list[_Worker] = []

    @property
    def replicas(self) -> int:
        """Processes that run and were not told to end."""
        self._reap()
        return len(self._running)

    @property
    def processes(self) -> int:
        self._reap()
        return len(self._running) + len(self._ending)

    def scale(self, replicas: int) -> None:
        """Start workers, or tell the oldest to end, until there are so many."""
        while self.replicas < replicas:
            self._start()
        while self.replicas > replicas:
            oldest = self._running.pop(0)
            oldest.process.terminate()
            self._ending.append(oldest)

    async def stop(self) -> None:
        """End all that is left."""
        self.scale(0)
        give_up = time.monotonic() + EXIT_S
        while self.processes and time.monotonic() < give_up:
            await asyncio.sleep(0.05)
        for late in self._ending:
            late.process.kill()
            late.process.wait(10)
            self.ended.append(None)
        self._ending.clear()

    def _start(self) -> None:
        self.started += 1
        name = f"{self.role}-{self.started}"
        environment = self._stack.environment(name, PDQ_HTTP_PORT="off", **self._settings)
        log = self._stack.directory / f"{name}.log"
        with open(log, "ab") as out:
            command = [sys.executable, "-m", "pdq", "worker", *self._options]
            self._running.append(_Worker(subprocess.Popen(command, env=environment, stdout=out, stderr=out), log))

    def _reap(self) -> None:
        for workers in (self._running, self._ending):
            for worker in [one for one in workers if one.process.poll() is not None]:
                workers.remove(worker)
                self.ended.append(worker.exit_code)


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def exit_code(self) -> int:
        code = int(self.process.returncode)
        return 0 if code == -signal.SIGTERM and STARTED not in self.log.read_text("utf-8", "replace") else code


class Policy(Protocol):
    """How many replicas there should be."""

    def decide(self, value: float | None, current: int, now: float) -> int: ...


class Starter:
    """Of workers that end by themselves: one is started where there is work and nobody is there."""

    def decide(self, value: float | None, current: int, now: float) -> int:
        return max(current, int(bool(value)))


class Scaling(msgspec.Struct, frozen=True):
    """A role under the driver."""

    deployment: Deployment
    number: Number
    policy: Policy
    polling_s: float

    @classmethod
    def of(cls, deployment: Deployment, scaled: Scaled, policy: Policy | None = None) -> Scaling:
        return cls(deployment, Number(scaled), policy or Replicas(scaled), scaled.polling_s)


class Driver:
    """Looks at each role again and again, and scales it. `rows`: what it saw and did."""

    def __init__(self, scalings: Sequence[Scaling]) -> None:
        self.rows: list[Row] = []
        self.began = time.time()
        self._scalings = scalings
        self._began = time.monotonic()

    async def run(self) -> None:
        """Until cancelled; the workers are left as they are."""
        async with asyncio.TaskGroup() as group:
            for scaling in self._scalings:
                group.create_task(self._drive(scaling))

    async def at_zero(self, seconds: float) -> bool:
        """Wait until it has seen that no role has a process, or wants one. False: not in time."""
        give_up = time.monotonic() + seconds
        while not all(self._is_at_zero(scaling.deployment.role) for scaling in self._scalings):
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(0.05)
        return True

    def _is_at_zero(self, role: StageName) -> bool:
        seen = of_role(self.rows, role)
        return bool(seen) and not seen[-1].replicas and not seen[-1].processes

    async def stop(self) -> None:
        await asyncio.gather(*(scaling.deployment.stop() for scaling in self._scalings))

    async def _drive(self, scaling: Scaling) -> None:
        deployment = scaling.deployment
        while True:
            lag = await asyncio.to_thread(scaling.number.value)
            now = time.monotonic() - self._began
            wanted = scaling.policy.decide(lag, deployment.replicas, now)
            deployment.scale(wanted)
            self.rows.append(
                Row(
                    at_s=round(now, 3),
                    role=deployment.role,
                    lag=lag,
                    replicas=wanted,
                    processes=deployment.processes,
                )
            )
            await asyncio.sleep(scaling.polling_s)


def of_role(rows: Sequence[Row], role: StageName) -> list[Row]:
    return [row for row in rows if row.role == role]


def changes(rows: Sequence[Row], role: StageName) -> list[int]:
    """How many replicas were wanted, one number for each change: [0, 1, 3, 0]."""
    found = [0]
    for row in of_role(rows, role):
        if row.replicas != found[-1]:
            found.append(row.replicas)
    return found


def worker_seconds(rows: Sequence[Row], role: StageName) -> float:
    """Process-seconds of a role, ending ones included."""
    mine = of_role(rows, role)
    return sum(row.processes * (after.at_s - row.at_s) for row, after in pairwise(mine))


def troubles(deployments: Mapping[StageName, Deployment]) -> list[str]:
    """Workers that did not end as they must."""
    return [
        f"a {role} worker ended with {code}"
        for role, deployment in deployments.items()
        for code in deployment.ended
        if code != 0
    ]
