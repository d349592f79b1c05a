"""What a process's start took, for those who waited for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pdq.otlp import Value
from pdq.telemetry.spans import StageSpan

COLD_START = "cold start"
"""The span of a start in the trace of a request that waited for it."""


class Start:
    """From the beginning of this process to `ready`. Parts may overlap: what begins together is not added up."""

    def __init__(self) -> None:
        """Taken by the process itself, once it runs code of its own: what went before counts as `import`."""
        self.began_ns = process_began_ns()
        self.ready_ns = 0
        """0 until it is ready. Unix nanoseconds, as `began_ns`."""
        self.parts_s = {"import": max(0, time.time_ns() - self.began_ns) / 1e9}
        """Seconds by part: `import`, `broker`, `engine`, parts of the engine's own, and `total` once ready."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.parts_s[name] = time.monotonic() - began

    def ready(self, parts_s: Mapping[str, float]) -> None:
        """It is over. `parts_s`: further parts that are known by now."""
        self.ready_ns = time.time_ns()
        self.parts_s |= {**parts_s, "total": (self.ready_ns - self.began_ns) / 1e9}

    def show(self, span: StageSpan, stored_ns: int) -> None:
        """Where a job was stored before the worker was ready: the part of its wait that the start was."""
        if 0 < stored_ns < self.ready_ns:
            parts: dict[str, Value] = {f"pdq.start.{name}_ms": round(s * 1e3, 1) for name, s in self.parts_s.items()}
            span.child(COLD_START, max(self.began_ns, stored_ns), self.ready_ns, parts)


def process_began_ns() -> int:
    """When this process was made, Unix nanoseconds, to 10 ms; now, where the system does not tell."""
    now_ns = time.time_ns()
    try:
        # The name before may hold anything but its closing parenthesis' end.
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        since_boot_ns = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return now_ns - max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot_ns)
    except (OSError, ValueError, IndexError, AttributeError):
        return now_ns
