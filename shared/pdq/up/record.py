"""stack.json: what runs, for every command that wants to know; and the lock that says whether it still does.

The supervisor writes the record anew, atomically, at each change. The lock is held by the supervisor and,
after its death, by its guard until the last process is gone: so a record whose lock is free is stale, even
where its process id has been given to another process since.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from pdq.errors import Misconfigured
from pdq.messages import ErrorInfo
from pdq.up.layout import Layout

LOCK_TIMEOUT_S = 1.0
"""Asking whether the lock is free holds it for a moment, so `claim` asks again for so long."""
CLOCK_TOLERANCE_S = 2.0

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped", "failed"]


class AlreadyRunning(Misconfigured):
    """Another `pdq up` holds this directory."""

    code = "already_running"


class ProcessRecord(msgspec.Struct, kw_only=True):
    """One process of the stack."""

    name: str
    state: State = "waiting"
    pid: int = 0
    started: float = 0.0
    """Unix seconds."""
    ports: dict[str, int] = {}
    """By what listens there, such as `http`; all on loopback."""
    restarts: int = 0
    took_s: float = 0.0
    """From its start until it was ready."""


class ModelName(msgspec.Struct, kw_only=True):
    slug: str
    id: str


class SiteRecord(msgspec.Struct, kw_only=True):
    """The site beside the hub (`pdq up --edge`). `name`: of its tenant at the hub, too."""

    name: str
    nats_url: str


class Record(msgspec.Struct, kw_only=True):
    """The stack as its supervisor sees it. `pid` is the supervisor's."""

    v: int = 1
    pid: int
    started: float
    """When the supervisor's process was made, Unix seconds: it tells this process from a later one."""
    state: State = "starting"
    note: str = ""
    """What is being done before there are processes, such as fetching the model."""
    engine: str = ""
    nats_url: str = ""
    site: SiteRecord | None = None
    models: tuple[ModelName, ...] = ()
    directory: str = ""
    processes: list[ProcessRecord] = []
    error: ErrorInfo | None = None
    """Why it failed, with the last lines of the log of the process that did."""

    @property
    def api_url(self) -> str:
        """OpenAI's API; empty before the gateway is started."""
        return self._api_url("gateway")

    @property
    def site_api_url(self) -> str:
        """The same of the site's own gateway; empty where there is none."""
        return self._api_url("site-gateway")

    def _api_url(self, name: str) -> str:
        port = next((process.ports.get("api", 0) for process in self.processes if process.name == name), 0)
        return f"http://127.0.0.1:{port}/v1" if port else ""

    def process(self, name: str) -> ProcessRecord:
        return next(process for process in self.processes if process.name == name)


def read(layout: Layout) -> Record | None:
    """The record as it was last written; None when there is none. It may be stale: see `running`."""
    try:
        return msgspec.json.decode(layout.record.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as exc:
        raise Misconfigured(f"cannot read {layout.record}: {exc}") from exc


def write(layout: Layout, record: Record) -> None:
    """Replace the record: a reader sees the old one or the new one."""
    beside = layout.record.with_suffix(".json.new")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record)))
    beside.replace(layout.record)


def remove(layout: Layout) -> None:
    layout.record.unlink(missing_ok=True)


def running(layout: Layout) -> Record | None:
    """The record of a stack that runs now, in whatever state; None when none does."""
    record = read(layout) if locked(layout) else None
    return record if record is not None and alive(record.pid, record.started) else None


def alive(pid: int, started: float) -> bool:
    """Whether this very process runs: its id may have been given to another one since."""
    made = process_started(pid)
    return made is not None and abs(made - started) < CLOCK_TOLERANCE_S


def process_started(pid: int) -> float | None:
    """When a process was made, Unix seconds; None when there is none, or only its zombie."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time())
    return None


def locked(layout: Layout) -> bool:
    """Whether anything of a stack is left in this directory."""
    try:
        with _open_lock(layout.lock, os.O_RDWR) as descriptor:
            return not _try_lock(descriptor)
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def claim(layout: Layout, wait_s: float) -> Iterator[int]:
    """Hold the lock for the length of a `with`; yields its descriptor, which the guard inherits.

    wait_s: how long to wait for a guard that is still ending what a dead supervisor left.
    Raises AlreadyRunning.
    """
    with _open_lock(layout.lock, os.O_RDWR | os.O_CREAT) as descriptor:
        give_up = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            other = running(layout)
            limit = give_up if other is not None else give_up + wait_s
            if time.monotonic() > limit:
                raise AlreadyRunning(_occupied(layout, other))
            time.sleep(0.05)
        yield descriptor


def _occupied(layout: Layout, other: Record | None) -> str:
    if other is None:
        return f"a stack holds {layout.lock}, but has written no {layout.record.name}"
    where = f", broker {other.nats_url}" if other.nats_url else ""
    return f"a stack is running already (pid {other.pid}{where}); `pdq status` shows it, `pdq down` stops it"


@contextlib.contextmanager
def _open_lock(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
