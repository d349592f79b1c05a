"""A worker that writes down when its engine is busy: `python -m tests.times.probe FILE MODULE`.

The numbers are those that the worker shows of its engine at /metrics, which it asks for every few milliseconds here,
not seconds. FILE gets a line with each change: Unix seconds, and 1 or 0. Busy: a request runs or waits in the engine,
or holds KV there. Nothing of this is in the services themselves.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdq import host
from pdq.telemetry import Metrics

EVERY_S = 0.002
HELD = ("running", "waiting", "kv_tokens", "kv_usage")
"""What an engine reports of requests that are in it; `kv_tokens` only sim does, `kv_usage` only vLLM."""


class Recorder:
    """Takes the place of `Metrics.engine`."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)
        self._busy: bool | None = None

    def take(self, metrics: Metrics, stats: Mapping[str, Any]) -> None:
        busy = any(stats.get(name) for name in HELD)
        if busy != self._busy:
            self._busy = busy
            self._file.write(f"{time.time():.6f} {int(busy)}\n")


def main() -> None:
    file, module = sys.argv[1:]
    recorder = Recorder(Path(file))
    host.STATS_S = EVERY_S
    Metrics.engine = lambda self, stats: recorder.take(self, stats)  # type: ignore[method-assign]
    sys.argv[1:] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
