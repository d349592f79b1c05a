"""CPU time of processes, and which of them was the limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

CPUCLOCK_SCHED = 2
"""Linux's clock of a process's CPU time, as part of a clock id (clock_getcpuclockid)."""
FULL = 0.85
"""Of a core: a process that has so much of one waits for nothing else."""
IDLE = 0.1
"""Share of the machine's time: where less is left, all cores are taken."""

Groups = Mapping[str, Sequence[int]]
"""Process ids by what they are."""


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has spent, in user and system."""
    if sys.platform == "linux":
        # The process's own CPU clock, in nanoseconds; psutil's figures have steps of 10 ms.
        return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


class Usage(NamedTuple):
    """seconds: how long it was. spent: CPU seconds by group, one for each process. idle: share of the machine's time
    that nobody had."""

    seconds: float
    spent: dict[str, list[float]]
    idle: float

    @property
    def cores(self) -> dict[str, float]:
        """In use, by group."""
        return {name: sum(each) / self.seconds for name, each in self.spent.items()}


class Meter:
    """What groups of processes use from now on."""

    def __init__(self, groups: Groups) -> None:
        self._began = time.monotonic()
        self._times = psutil.cpu_times()
        self._before = {name: {pid: cpu_s(pid) for pid in pids} for name, pids in groups.items()}

    def usage(self) -> Usage:
        """So far."""
        seconds, times = time.monotonic() - self._began, psutil.cpu_times()
        passed = sum(times) - sum(self._times)
        spent = {name: [cpu_s(pid) - before for pid, before in pids.items()] for name, pids in self._before.items()}
        return Usage(seconds, spent, (times.idle - self._times.idle) / passed if passed else 1.0)


def limit(usage: Usage, cores: int) -> str:
    """What kept a rate from rising, in words: a process that had a core to itself, the cores, or nothing seen."""
    most = {name: max(each, default=0.0) / usage.seconds for name, each in usage.spent.items()}
    busiest = max(most, key=lambda name: most[name])
    if most[busiest] >= FULL:
        return f"{busiest}: {most[busiest]:.2f} of one core"
    largest = max(usage.cores, key=lambda name: usage.cores[name])
    own = sum(usage.cores.values())
    told = f"{own:.1f} of {cores}, {largest} {usage.cores[largest]:.1f} of them"
    if usage.idle >= IDLE:
        return f"no process, and not the cores ({told})"
    others = cores * (1 - usage.idle) - own
    return f"the cores ({told}{f'; other work {others:.1f}' if others > IDLE * cores else ''})"
