"""What each process holds, every few seconds, in a file: memory, files, threads, and the CPU time it has used."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

MB = 1e6
QUANTITIES = ("rss_mb", "fds", "threads")
"""What may not grow."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s`: since the load began. `rss_mb`: resident memory, MB of 10^6 bytes. `cpu_s`: user and system."""

    at_s: float
    process: str
    rss_mb: float
    fds: int
    threads: int
    cpu_s: float


class Samples:
    """Appends to a CSV file. The file, not this process, remembers: what measures must not grow either."""

    def __init__(self, path: Path, pids: Mapping[str, int]) -> None:
        self.path = path
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        with open(path, "w", newline="") as file:
            csv.writer(file).writerow(Sample.__struct_fields__)

    def take(self, at_s: float) -> None:
        """Add a line for each process. Raises psutil.NoSuchProcess where one has ended."""
        rows = [msgspec.structs.astuple(_sample(name, process, at_s)) for name, process in self._processes.items()]
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerows(rows)


def _sample(name: str, process: psutil.Process, at_s: float) -> Sample:
    with process.oneshot():
        cpu = process.cpu_times()
        return Sample(
            at_s=round(at_s, 2),
            process=name,
            rss_mb=round(process.memory_info().rss / MB, 3),
            fds=process.num_fds(),
            threads=process.num_threads(),
            cpu_s=round(cpu.user + cpu.system, 2),
        )


def read(path: Path) -> dict[str, list[Sample]]:
    """All samples, by process."""
    by_process: dict[str, list[Sample]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            by_process.setdefault(row["process"], []).append(msgspec.convert(row, Sample, strict=False))
    return by_process
