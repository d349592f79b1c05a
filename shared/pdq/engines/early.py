"""The engine core's process, begun before there is anything to tell it.

vLLM's CPU build spawns its core once its front is imported and configured, and the core then imports all of it again:
a third of a start. Here the process is begun first. It imports while the front does, waits at its pipe, and becomes
the process that `multiprocessing` would have spawned: the same message, in the same environment, on the same CPUs.
Where the worker's own process has imported everything before it did anything else (`pdq.up.template`), the core is
a copy of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import signal
import struct
import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import context, popen_spawn_posix, reduction, resource_tracker, spawn, util
from typing import Any, NoReturn

FRONT = "vllm.v1.engine.async_llm"
MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "pdq.engines.connector")
"""What takes long to import of all that a core needs."""
LENGTH = struct.Struct("!Q")
COPY_ARGV = ["-c", "--multiprocessing-fork"]
"""What `multiprocessing` knows its own processes by."""


def load(modules: Sequence[str], *, patient: bool = False) -> None:
    """Import them. Raises what an import raises, unless `patient`: whoever needs it then hears of it later.

    With no collection of garbage meanwhile, and none that looks at what was imported, ever: it stays, and looking for
    garbage in it takes a third of such an import's time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        for name in modules:
            with contextlib.suppress(Exception) if patient else contextlib.nullcontext():
                importlib.import_module(name)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


class EarlyProcess:
    """A process that imports, and waits for `multiprocessing`'s message. `close` ends it where none was sent."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        """Raises OSError."""
        tracker = resource_tracker.getfd()
        assert tracker is not None
        self._modules = modules
        self._taken = False
        self.sentinel, child_w = os.pipe()
        child_r, self.pipe = os.pipe()
        try:
            self.pid = self._begin(tracker, child_r, child_w)
        finally:
            os.close(child_r)
            os.close(child_w)

    def _begin(self, tracker: int, pipe: int, alive: int) -> int:
        """The new process. It has these descriptors; `alive` is open as long as it lives."""
        code = f"from pdq.engines.early import become; become({tracker}, {pipe}, {list(self._modules)!r})"
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [spawn.get_executable(), *flags, "-c", code, COPY_ARGV[1]]
        return util.spawnv_passfds(os.fsencode(sys.executable), command, [tracker, pipe, alive])

    def take(self) -> bool:
        """True for the first who asks: the process, and its pipes, are his."""
        first, self._taken = not self._taken, True
        return first

    def close(self) -> None:
        """End and reap it, unless somebody took it."""
        if self.take():
            os.close(self.pipe)
            os.close(self.sentinel)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


class CopiedProcess(EarlyProcess):
    """One that has all imported from its first moment: a copy of this process, which must have no second thread."""

    def _begin(self, tracker: int, pipe: int, alive: int) -> int:
        if pid := os.fork():
            return pid
        # Nothing of the caller's goes on here, whatever happens.
        try:
            os.close(self.pipe)
            os.close(self.sentinel)
            sys.argv = list(COPY_ARGV)
            become(tracker, pipe, self._modules)
        except SystemExit as exc:
            _end(exc.code if isinstance(exc.code, int) else 1)
        except BaseException:
            traceback.print_exc()
            _end(1)


def _end(status: int) -> NoReturn:
    """As `multiprocessing` ends what it forked: what the copied process has to do at its exit is not done twice."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


@contextlib.contextmanager
def spawning(early: EarlyProcess) -> Iterator[None]:
    """Within it, the first process that vLLM spawns for a core is `early`."""
    from vllm.v1.engine import utils

    ordinary = utils.get_mp_context
    utils.get_mp_context = lambda: _Context(ordinary(), early)
    try:
        yield
    finally:
        utils.get_mp_context = ordinary


def become(tracker_fd: int, pipe: int, modules: Sequence[str]) -> NoReturn:
    """Import, then be the process that the message at `pipe` tells of."""
    from pdq.engines.plugin import register

    register()
    load(modules, patient=True)
    try:
        (length,) = LENGTH.unpack(_read(pipe, LENGTH.size))
        told = json.loads(_read(pipe, length))
    except EOFError:
        sys.exit(0)
    os.environ.clear()
    os.environ.update(told["environ"])
    os.sched_setaffinity(0, told["cpus"])
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker_fd)
    sys.exit(0)


def _read(pipe: int, size: int) -> bytes:
    """Exactly so many bytes: what follows is for `multiprocessing`. Raises EOFError."""
    found = b""
    while len(found) < size:
        some = os.read(pipe, size - len(found))
        if not some:
            raise EOFError
        found += some
    return found


class _Context:
    """A context of `multiprocessing` whose first spawned process exists already."""

    def __init__(self, ordinary: Any, early: EarlyProcess) -> None:
        self._ordinary = ordinary
        self._early = early

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ordinary, name)

    def Process(self, *args: Any, **options: Any) -> Any:
        if self._ordinary.get_start_method() != "spawn":
            return self._ordinary.Process(*args, **options)
        process = _Process(*args, **options)
        process.early = self._early
        return process


class _Process(context.SpawnProcess):
    early: EarlyProcess | None = None

    @staticmethod
    def _Popen(process: Any) -> Any:
        return _Popen(process)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "early"}


class _Popen(popen_spawn_posix.Popen):
    """Sends the message to the process that waits for it. One that needs more open files is spawned as usual."""

    def _launch(self, process: Any) -> None:
        early: EarlyProcess | None = process.early
        message = self._message(process)
        if early is None or self._fds or not early.take():
            self._fds: list[int] = []
            super()._launch(process)  # type: ignore[misc]
            return
        self.pid, self.sentinel = early.pid, early.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (early.sentinel, early.pipe))  # type: ignore[attr-defined]
        # Open for as long as this process lives: its end tells the other.
        with open(early.pipe, "wb", closefd=False) as pipe:
            pipe.write(message)

    def _message(self, process: Any) -> bytes:
        # Its CPUs are those of the thread that asks for it, as if it were made only now.
        place = {"environ": dict(os.environ), "cpus": sorted(os.sched_getaffinity(0))}
        head = json.dumps(place).encode()
        told = io.BytesIO()
        told.write(LENGTH.pack(len(head)) + head)
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process.name), told)
            reduction.dump(process, told)
        finally:
            context.set_spawning_popen(None)
        return told.getvalue()
