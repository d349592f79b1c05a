"""How much memory the processes of a stack hold, and whether that grew."""

from __future__ import annotations

import os
from pathlib import Path

from tests.stack import Stack

MOST_GROWTH_BYTES = 64 << 20
"""What a process may grow by in a test: far more than any limit of its own, far less than what is sent at it."""


def memory(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memories(stack: Stack) -> dict[str, int]:
    """Of the broker and of each service, bytes."""
    processes = {service.module: service.process for service in stack.services} | {"broker": stack.broker.process}
    return {name: memory(process.pid) for name, process in processes.items() if process is not None}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Who grew by more than may be, and by how much."""
    return {name: after[name] - before[name] for name in before if after[name] - before[name] > MOST_GROWTH_BYTES}
