"""CPU time of processes, and which of them was the limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import psutil

CPUCLOCK_SCHED = 2
"""Linux's clock of a process's CPU time, as part of a clock id (clock_getcpuclockid)."""
FULL = 0.85
"""Of a core, or of all: a process that has so much of one waits for nothing else."""

Groups = Mapping[str, Sequence[int]]
"""Process ids by what they are."""


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has spent, in user and system."""
    if sys.platform == "linux":
        # The process's own CPU clock, in nanoseconds; psutil's figures have steps of 10 ms.
        return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


class Meter:
    """What groups of processes spend from now on."""

    def __init__(self, groups: Groups) -> None:
        self._before = {name: {pid: cpu_s(pid) for pid in pids} for name, pids in groups.items()}

    def spent(self) -> dict[str, list[float]]:
        """CPU seconds so far, by group, one for each process."""
        return {name: [cpu_s(pid) - before for pid, before in pids.items()] for name, pids in self._before.items()}


def limit(spent: Mapping[str, Sequence[float]], seconds: float, cores: int) -> str:
    """What kept the rate from rising, in words: a process that had a core to itself, the cores, or nothing seen."""
    shares = {name: [each / seconds for each in processes] for name, processes in spent.items()}
    busiest = max(shares, key=lambda name: max(shares[name], default=0.0))
    if (most := max(shares[busiest], default=0.0)) >= FULL:
        return f"{busiest}: {most:.2f} of one core"
    used = sum(map(sum, shares.values()))
    largest = max(shares, key=lambda name: sum(shares[name]))
    told = f"{used:.1f} of {cores} cores, {sum(shares[largest]):.1f} of them {largest}"
    return f"the cores: {told}" if used >= FULL * cores else f"no process: {told}"
