"""Doing to a cluster what a plan says, and undoing it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from tests.chaos.cluster import Cluster, Node
from tests.chaos.plan import Fault, FaultKind
from tests.chaos.proxy import Proxy

MOST_DELAY_S = 0.3


class Faults:
    """Runs faults at their times. One that meets its target in the hands of another is skipped."""

    def __init__(self, cluster: Cluster) -> None:
        self.done: Counter[tuple[FaultKind, str]] = Counter()
        """By kind and role (or `client`, `broker`)."""
        self.skipped = 0
        self._cluster = cluster
        self._broker = asyncio.Lock()

    async def run(self, faults: Sequence[Fault], started: float) -> None:
        """All of them; returns when the last is undone. `started`: monotonic time of the run's start."""
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                group.create_task(self._at(fault, started))

    def count(self, kind: FaultKind) -> int:
        return sum(count for (found, _), count in self.done.items() if found == kind)

    async def _at(self, fault: Fault, started: float) -> None:
        await asyncio.sleep(max(0.0, started + fault.at_s - time.monotonic()))
        if await self._apply(fault):
            self.done[fault.kind, fault.target.partition("-")[0]] += 1
        else:
            self.skipped += 1

    async def _apply(self, fault: Fault) -> bool:
        match fault.kind:
            case "broker":
                return await self._restart_broker(fault)
            case "cut" | "silent" | "delay":
                return await self._break(self._cluster.proxies[fault.target], fault)
            case "kill":
                return await self._process(fault, self._kill)
            case "pause":
                return await self._process(fault, self._pause)
            case "drain":
                return await self._process(fault, self._drain)

    async def _process(self, fault: Fault, happen: Callable[[Node, Fault], Awaitable[None]]) -> bool:
        node = self._cluster.nodes[fault.target]
        if node.busy or not node.alive:
            return False
        node.busy = True
        try:
            await happen(node, fault)
        finally:
            node.busy = False
        return True

    async def _kill(self, node: Node, fault: Fault) -> None:
        node.kill()
        await asyncio.sleep(fault.lasts_s)
        node.start()

    async def _pause(self, node: Node, fault: Fault) -> None:
        node.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            node.send(signal.SIGCONT)

    async def _drain(self, node: Node, fault: Fault) -> None:
        self._cluster.note_exit(node, await node.terminate())
        await asyncio.sleep(fault.lasts_s)
        node.start()

    async def _break(self, proxy: Proxy, fault: Fault) -> bool:
        if not proxy.healthy:
            return False
        match fault.kind:
            case "cut":
                proxy.cut()
            case "silent":
                proxy.silent()
            case _:
                proxy.delay(0.02 + fault.strength * MOST_DELAY_S)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            proxy.heal()
        return True

    async def _restart_broker(self, fault: Fault) -> bool:
        """Two of three times by SIGKILL, else by SIGTERM; the store is kept."""
        if self._broker.locked():
            return False
        async with self._broker:
            broker = self._cluster.broker
            await self._cluster.at_broker(broker.kill if fault.strength < 0.67 else broker.stop)
            await asyncio.sleep(fault.lasts_s)
            await self._cluster.at_broker(broker.start)
        return True
