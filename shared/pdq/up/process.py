"""One child process: its start, its end, its log; and the guard that outlives a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

GUARD = Path(__file__).with_name("guard.py")
GUARD_PATIENCE_S = 5.0
"""The guard gives groups so long after SIGTERM, and again after SIGKILL."""
POLL_S = 0.05
KILL_TIMEOUT_S = 5.0
TAIL_BYTES, TAIL_LINES, TAIL_COLUMNS = 16_384, 10, 300


class Spec(NamedTuple):
    """How to run one process. `ready` is asked again and again; it returns soon, whatever happens."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready: Callable[[], Awaitable[bool]]
    ports: Mapping[str, int] = {}
    stop_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    leftovers: tuple[Path, ...] = ()
    """Files to delete once it is gone: what only an orderly end deletes."""
    vital: bool = True
    """The stack ends when this one does not stay. Others are started anew for as long as the stack runs."""


class Guard:
    """The supervisor's side of guard.py. It is started anew if it dies."""

    def __init__(self, lock: int) -> None:
        """`lock`: descriptor of the stack's lock, which the guard holds too."""
        self._lock = lock
        self._lines: dict[str, None] = {}
        self._process = self._start()

    def add(self, group: int, leftovers: tuple[Path, ...] = ()) -> None:
        for line in (f"group {group}", *(f"file {path}" for path in leftovers)):
            self._lines[line] = None
            self._send(line)

    def drop(self, group: int) -> None:
        self._lines.pop(f"group {group}", None)
        self._send(f"ended {group}")

    def check(self) -> None:
        """Start it again if it is gone."""
        if self._process.poll() is not None:
            self._process = self._start()
            for line in self._lines:
                self._send(line)

    def close(self) -> None:
        """Let it end what is left, and wait for it; bounded."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3 * GUARD_PATIENCE_S)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(GUARD_PATIENCE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Out of reach of whatever is sent to the supervisor's group or terminal.
            start_new_session=True,
            pass_fds=(self._lock,),
        )

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        # A dead guard is found, and told everything, by `check`.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()


class Running(Protocol):
    """A child process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...


class Child:
    """A running process, the leader of a group of its own: signals of the terminal reach the supervisor alone."""

    def __init__(self, spec: Spec, log: Path, guard: Guard, made: Running | None = None) -> None:
        """Start it, unless it is `made` already. Its output is appended to `log`. Raises OSError."""
        self.spec = spec
        self.started = time.monotonic()
        self._guard = guard
        self._process = made or _started(spec, log)
        self._guard.add(self.pid, spec.leftovers)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """Its exit status (negative: a signal's number) once it has ended; nothing of its group is left then."""
        if self._process.returncode is None and self._process.poll() is not None:
            self._kill_group()
            self._guard.drop(self.pid)
            for path in self.spec.leftovers:
                with contextlib.suppress(OSError):
                    path.unlink()
        return self._process.returncode

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for its whole group once `stop_s` is over. Bounded."""
        if self.ended() is None:
            self._process.terminate()
        if not await self._wait(self.spec.stop_s):
            self.kill()
            await self._wait(KILL_TIMEOUT_S)

    def kill(self) -> None:
        if self.ended() is None:
            self._kill_group()

    async def _wait(self, bound_s: float) -> bool:
        give_up = time.monotonic() + bound_s
        while self.ended() is None:
            if time.monotonic() > give_up:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _started(spec: Spec, log: Path) -> Running:
    with open(log, "ab") as output:
        return subprocess.Popen(
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(spec.environment),
            start_new_session=True,
        )


def tail(log: Path) -> str:
    """The last lines of a log, for an error's message."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as exc:
        return f"(cannot read {log}: {exc.strerror})"
    return "\n".join(line[:TAIL_COLUMNS] for line in text.splitlines()[-TAIL_LINES:])


def exit_text(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
