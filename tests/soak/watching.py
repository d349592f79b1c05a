"""Watches a stack: takes samples, scrapes every service as Prometheus would, and keeps the KV directory small."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.soak import gauges
from tests.soak.samples import Samples
from tests.stack import Service

BUSY = "pdq_worker_busy_slots"


class Watching:
    """`slots`: of each worker, by role. `keep_s`: KV files that are older are removed, which is their owner's to do."""

    def __init__(
        self, samples: Samples, services: Mapping[str, Service], slots: Mapping[str, int], kv: Path, keep_s: float
    ) -> None:
        self.samples = samples
        self._services = services
        self._kv = kv
        self._keep_s = keep_s
        self._began = time.monotonic()
        self._moved: set[str] = set()
        self._slots = slots
        self._busy: Counter[str] = Counter()
        self._scrapes: Counter[str] = Counter()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    async def run(self, every_s: float) -> None:
        """Until cancelled. Raises psutil.NoSuchProcess when a process has ended."""
        while True:
            self.samples.take(self.now_s)
            for name in self._services:
                self._note(name, await self._work(name))
            await asyncio.to_thread(self._sweep)
            await asyncio.sleep(every_s - self.now_s % every_s)

    def never_moved(self) -> list[str]:
        return [name for name in gauges.MUST_MOVE if name not in self._moved]

    def busy(self) -> dict[str, float]:
        """Share of the slots that were in use, by role, on average over all scrapes so far."""
        return {role: round(self._busy[role] / slots / self._scrapes[role], 3) for role, slots in self._slots.items()}

    async def not_zero(self, log: bool) -> list[str]:
        """Gauges of all services that are not zero now. `log`: those of the log, too."""
        found = []
        for name in self._services:
            series = await self._work(name)
            left = {one: value for one, value in series.items() if value and (log or not gauges.log_messages(one))}
            found += [f"{name} {one} {value:g}" for one, value in left.items()]
            if not series:
                found.append(f"{name} does not tell its gauges")
        return found

    async def _work(self, name: str) -> gauges.Series:
        status, text = await asyncio.to_thread(self._services[name].get, "/metrics")
        return gauges.work(text) if status == 200 else {}

    def _note(self, name: str, series: gauges.Series) -> None:
        self._moved |= {one.partition("{")[0] for one, value in series.items() if value > 0}
        role = name.partition("-")[0]
        if role in self._slots and BUSY in series:
            self._busy[role] += int(series[BUSY])
            self._scrapes[role] += 1

    def _sweep(self) -> None:
        oldest = time.time() - self._keep_s
        for path in self._kv.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
