"""The supervisor's side of template.py: workers that are copies of one process, which has imported everything.

Only the first start of a stack is made like this. A worker that dies is started again by itself, as it is where the
template cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from pdq.up.process import Guard, Spec
from pdq.up.template import MODULES, Said, Wanted

IMPORT_S = 300.0
"""Until the template has imported everything: seconds, or minutes from a cold disk."""
COPY_S = 30.0
"""Until it has made copies and ended."""
POLL_S = 0.05
SET_CHILD_SUBREAPER = 36
"""Of Linux's prctl: the children of a child that ends become those of this process."""


class Copy:
    """A child of this process that another one made: as much of `subprocess.Popen` as is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class Template:
    """Begun when it is made; `close` ends it. In between: `imported`, `copies`, `go`. Linux only."""

    def __init__(
        self, environment: Mapping[str, str], log: Path, guard: Guard, modules: Sequence[str] = MODULES
    ) -> None:
        """`modules`: what it imports. Raises OSError."""
        self._guard = guard
        self._said = b""
        _adopt(True)
        self._heard, channel = os.pipe()
        os.set_blocking(self._heard, False)
        try:
            with open(log, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pdq.up.template", str(channel), *modules],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                    pass_fds=(channel,),
                )
        except OSError:
            self._forget()
            raise
        finally:
            os.close(channel)
        self._guard.add(self._process.pid)

    async def imported(self) -> bool:
        """Wait until it can be copied; False when it cannot."""
        return await self._hear(IMPORT_S) is not None

    async def copies(self, specs: Sequence[Spec], logs: Mapping[str, Path]) -> dict[str, Copy]:
        """Have these made; each waits for `go`. Empty when the template is gone. `logs`: a file for each name."""
        wanted = [Wanted(spec.name, spec.command[-1], dict(spec.environment), str(logs[spec.name])) for spec in specs]
        self._tell(msgspec.json.encode(wanted) + b"\n")
        said = await self._hear(COPY_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, COPY_S)
        _adopt(False)
        # Only now that it has ended are they this process's own.
        return {name: Copy(pid) for name, pid in said.pids.items()} if said and self._process.poll() == 0 else {}

    def go(self, copies: int) -> None:
        """Let the copies begin, once somebody else looks after them."""
        self._tell(b"." * copies)

    def close(self) -> None:
        """End it, and copies that were not told to go. What goes on by itself does."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(COPY_S)
        self._guard.drop(self._process.pid)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._forget()

    def _forget(self) -> None:
        os.close(self._heard)
        _adopt(False)

    def _tell(self, data: bytes) -> None:
        assert self._process.stdin is not None
        # Its end is seen by whoever waits for an answer.
        with contextlib.suppress(OSError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    async def _hear(self, bound_s: float) -> Said | None:
        """Its next line; None when there is none within the bound, or it has ended."""
        give_up = time.monotonic() + bound_s
        while b"\n" not in self._said:
            try:
                some = os.read(self._heard, 1 << 16)
            except BlockingIOError:
                if time.monotonic() > give_up:
                    return None
                await asyncio.sleep(POLL_S)
                continue
            if not some:
                return None
            self._said += some
        line, _, self._said = self._said.partition(b"\n")
        return msgspec.json.decode(line, type=Said)


def _adopt(on: bool) -> None:
    """Whether children of children that end come to this process. Raises OSError where it cannot be had."""
    if ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError("the children of others cannot be adopted")
