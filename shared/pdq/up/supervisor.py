"""Runs the processes of a stack: starts them in order, keeps them running, stops them in the reverse order."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from pdq.errors import PdqError
from pdq.up import record as records
from pdq.up.copies import Template
from pdq.up.layout import Layout
from pdq.up.process import Child, Guard, Running, Spec, exit_text, tail
from pdq.up.record import ProcessRecord, Record

POLL_S = 0.1
PROBE_S = 0.25
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
STEADY_S = 60.0
"""A process that has run for so long has its restarts forgiven."""

Show = Callable[[Record], None]


class StackFailed(PdqError):
    """A process of the stack does not start, or does not stay."""

    code = "stack_failed"


class Recorder:
    """The record in the making: every change is written down and shown."""

    def __init__(self, layout: Layout, record: Record, show: Show) -> None:
        self.record = record
        self.layout = layout
        self._show = show

    def set(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, **changes)
        self._publish()

    def set_process(self, name: str, **changes: object) -> None:
        found = self.record.process(name)
        for field, value in changes.items():
            setattr(found, field, value)
        self._publish()

    def _publish(self) -> None:
        records.write(self.layout, self.record)
        self._show(self.record)


class Supervisor:
    """`start` each process in its order, then `watch`; `stop` ends all of them."""

    def __init__(
        self, layout: Layout, recorder: Recorder, guard: Guard, backoff_s: Sequence[float] = BACKOFF_S
    ) -> None:
        """`backoff_s`: waits before the restarts of a process that keeps dying; after as many it gives up.

        A process that is not vital never is: the last wait is that before each further restart.
        """
        self._backoff_s = backoff_s
        self._layout = layout
        self._recorder = recorder
        self._guard = guard
        self._levels: list[list[str]] = []
        self._children: dict[str, Child] = {}
        self._killing = False

    def expect(self, *names: str) -> None:
        """Name the processes that will be started, so that all are shown from the beginning."""
        self._recorder.set(processes=[ProcessRecord(name=name) for name in names])

    async def start(self, *levels: list[Spec]) -> None:
        """Start these side by side and return once all are ready.

        What is in one list stops together, before the lists and the starts that came earlier.
        Waits without a bound: the caller has one for the whole stack. Raises StackFailed when one dies.
        """
        self._levels.extend([spec.name for spec in level] for level in levels)
        await together(*map(self._start, itertools.chain(*levels)))

    async def start_copies(self, specs: list[Spec], template: Template) -> None:
        """As `start`, of one level, by copies of `template` where it can make them."""
        self._levels.append([spec.name for spec in specs])
        copies = await template.copies(specs, {spec.name: self._layout.log(spec.name) for spec in specs})
        children = [self._spawn(spec, "starting", copies.get(spec.name)) for spec in specs]
        template.go(len(copies))
        await together(*map(self._until_ready, children))

    async def watch(self) -> None:
        """Restart what dies. Never returns; raises StackFailed when a vital process does not stay."""
        await together(self._check_guard(), *map(self._keep, self._children.values()))

    async def _check_guard(self) -> None:
        while True:
            self._guard.check()
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop everything, last started first; bounded by the processes' own bounds."""
        for names in reversed(self._levels):
            children = [self._children[name] for name in names if name in self._children]
            await asyncio.gather(*(self._stop(child) for child in children))

    def kill(self) -> None:
        """End everything at once; `stop` then has nothing to wait for."""
        self._killing = True
        for child in self._children.values():
            child.kill()

    async def _stop(self, child: Child) -> None:
        if child.ended() is not None:
            self._recorder.set_process(child.spec.name, pid=0)
            return
        if self._killing:
            child.kill()
        self._recorder.set_process(child.spec.name, state="stopping")
        await child.stop()
        self._recorder.set_process(child.spec.name, state="stopped", pid=0)

    async def _start(self, spec: Spec) -> None:
        await self._until_ready(self._spawn(spec, "starting"))

    async def _until_ready(self, child: Child) -> None:
        while not await child.spec.ready():
            self.check("while the stack was starting")
            await asyncio.sleep(PROBE_S)
        self._ready(child)

    def check(self, when: str) -> None:
        """Raise StackFailed if a process has ended, with the end of its log. `when`: as the error says it."""
        for name, child in self._children.items():
            if (status := child.ended()) is not None:
                self._recorder.set_process(name, state="failed", pid=0)
                raise StackFailed(self._story(name, f"{name} ended {when}", status))

    def _spawn(self, spec: Spec, state: records.State, made: Running | None = None) -> Child:
        try:
            child = Child(spec, self._layout.log(spec.name), self._guard, made)
        except OSError as exc:
            self._recorder.set_process(spec.name, state="failed", pid=0)
            raise StackFailed(f"cannot run {spec.command[0]} for {spec.name}: {exc.strerror}") from exc
        self._children[spec.name] = child
        # One that was made before tells by itself when that was.
        started = (records.process_started(child.pid) if made is not None else None) or time.time()
        self._recorder.set_process(spec.name, state=state, pid=child.pid, started=started, ports=dict(spec.ports))
        return child

    def _ready(self, child: Child) -> None:
        self._recorder.set_process(child.spec.name, state="ready", took_s=round(time.monotonic() - child.started, 1))

    async def _keep(self, child: Child) -> None:
        """Restart one process for as long as it does not die too often."""
        spec, failures = child.spec, 0
        while True:
            status = await self._watched(child)
            failures = 1 if time.monotonic() - child.started > STEADY_S else failures + 1
            if failures > len(self._backoff_s) and spec.vital:
                self._recorder.set_process(spec.name, state="failed", pid=0)
                raise StackFailed(self._story(spec.name, f"{spec.name} died {failures} times in a row", status))
            restarts = self._recorder.record.process(spec.name).restarts + 1
            self._recorder.set_process(spec.name, state="restarting", pid=0, restarts=restarts)
            await asyncio.sleep(self._backoff_s[min(failures, len(self._backoff_s)) - 1])
            child = self._spawn(spec, "restarting")

    async def _watched(self, child: Child) -> int:
        """Wait until it ends; say when it gets ready."""
        known_ready = self._recorder.record.process(child.spec.name).state == "ready"
        while (status := child.ended()) is None:
            if not known_ready and await child.spec.ready():
                known_ready = True
                self._ready(child)
            await asyncio.sleep(POLL_S)
        return status

    def _story(self, name: str, what: str, status: int) -> str:
        log = self._layout.log(name)
        return f"{what} ({exit_text(status)}); the end of {log}:\n{tail(log)}"


async def together(*steps: Coroutine[Any, Any, None]) -> None:
    """Run these side by side. Raises what the first of them that fails raises: one story is enough."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


def unready(record: Record, timeout_s: float) -> StackFailed:
    """The error for a start that took too long."""
    late = ", ".join(process.name for process in record.processes if process.state != "ready")
    logs = f"their logs are in {record.directory}/logs"
    return StackFailed(f"the stack is not ready within {timeout_s:g} s, still waiting for {late}; {logs}")
