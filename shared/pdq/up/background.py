"""A stack in the background: `pdq up --detach` starts one and waits for it, `pdq down` ends one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pdq.errors import PdqError, Unavailable
from pdq.up import record as records
from pdq.up.layout import Layout
from pdq.up.plan import Options, clean
from pdq.up.process import GUARD_PATIENCE_S, tail
from pdq.up.record import Record
from pdq.up.supervisor import Show

POLL_S = 0.1
SLACK_S = 30.0
"""A supervisor bounds its own start; this much later it counts as stuck."""
DOWN_TIMEOUT_S = 90.0
"""All processes that do not listen to SIGTERM, one after the other."""


class UpFailed(PdqError):
    """A supervisor in the background ended; `code` is what it ended with."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def detach(options: Options, arguments: Sequence[str], show: Show) -> Record:
    """Start a supervisor in the background and return once its stack is ready.

    arguments: those of `pdq up` that `options` were made from, in the foreground's form. If this process is
    interrupted first, the supervisor is too. Raises AlreadyRunning or UpFailed.
    """
    layout = options.layout
    layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with records.claim(layout, wait_s=3 * GUARD_PATIENCE_S):
        layout.logs.mkdir(mode=0o700, exist_ok=True)
    log = layout.root / "up.log"
    supervisor = _spawn(arguments, clean(options.environ), log)
    try:
        return _wait_ready(supervisor, layout, log, show, options.timeout_s + SLACK_S)
    except BaseException:
        if supervisor.poll() is None:
            supervisor.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(DOWN_TIMEOUT_S)
        raise


def _spawn(arguments: Sequence[str], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pdq", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )


def _wait_ready(supervisor: subprocess.Popen[bytes], layout: Layout, log: Path, show: Show, timeout_s: float) -> Record:
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        ended = supervisor.poll() is not None
        record = records.read(layout)
        if record is not None and record.pid == supervisor.pid:
            show(record)
            if record.error is not None:
                raise UpFailed(record.error.message, record.error.code)
            if record.state == "ready":
                return record
        if ended:
            raise UpFailed(f"`pdq up` ended with status {supervisor.returncode}:\n{tail(log)}", "stack_failed")
        time.sleep(POLL_S)
    raise UpFailed(f"`pdq up` has not become ready, nor given up, within {timeout_s:g} s; see {log}", "stack_failed")


def down(layout: Layout) -> Record | None:
    """End the stack of this directory and return what it was; None when none runs.

    Raises Unavailable when something is still there after `DOWN_TIMEOUT_S` and a SIGKILL.
    """
    if not records.locked(layout):
        return None
    record = _started(layout)
    if record is not None:
        _signal(record, signal.SIGTERM)
    if not _ended(layout, record, DOWN_TIMEOUT_S):
        if record is not None:
            _signal(record, signal.SIGKILL)
        # Its guard ends what it leaves.
        if not _ended(layout, record, 3 * GUARD_PATIENCE_S):
            raise Unavailable(f"the stack in {layout.root} does not end; `pdq status` shows what is left")
    if record is not None and (left := records.read(layout)) is not None and left.pid == record.pid:
        records.remove(layout)
    return record


def _started(layout: Layout) -> Record | None:
    """The record of the stack that holds the lock: one that has only just begun may not have written it yet."""
    give_up = time.monotonic() + 2.0
    while (record := records.running(layout)) is None and records.locked(layout) and time.monotonic() < give_up:
        time.sleep(POLL_S)
    return record


def _signal(record: Record, number: signal.Signals) -> None:
    if records.alive(record.pid, record.started):
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _ended(layout: Layout, record: Record | None, bound_s: float) -> bool:
    """Wait until nothing holds the lock, and the supervisor is gone."""
    give_up = time.monotonic() + bound_s
    while records.locked(layout) or (record is not None and records.alive(record.pid, record.started)):
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)
    return True
