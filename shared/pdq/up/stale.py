"""What is left of a stack whose supervisor and guard are both gone."""

from __future__ import annotations

import contextlib
import os
import signal

from pdq.errors import Misconfigured
from pdq.up import record as records
from pdq.up.layout import Layout


def end_stale(layout: Layout) -> list[int]:
    """End the processes that a stale record names, if they are still those, and forget it; returns their ids.

    Called with the lock held: nobody else looks after them.
    """
    ended = []
    with contextlib.suppress(Misconfigured):
        record = records.read(layout)
        for process in record.processes if record is not None else []:
            if process.pid and records.alive(process.pid, process.started):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                    ended.append(process.pid)
    records.remove(layout)
    return ended
