"""One process that imports what engines import, and becomes workers: `python -m pdq.up.template FD MODULE...`.

Imports are most of an engine's start, and the same in each of its processes. Here they are done once: every worker is
a copy of this process, made before it has a second thread, and so is the worker's engine core.

It says on FD that all is imported, reads the workers from its standard input (a line of JSON), says their process ids,
and ends: its parent, or whoever adopts in its parent's place, has them then. A copy begins once it has read a byte of
the same input; where none comes it ends, so that nothing is left of a start that was given up.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from pdq import service
from pdq.engines import early, plugin

MODULES = (early.FRONT, *early.MODULES, "pdq_prefill.__main__", "pdq_decode.__main__")
LINE_BYTES = 1 << 20


class Wanted(msgspec.Struct):
    """A worker: its service's module, its whole environment, the file that its output is appended to."""

    name: str
    module: str
    environment: dict[str, str]
    log: str


class Said(msgspec.Struct):
    """What the template says, a line each: first that all is imported, then which processes it has made."""

    pids: dict[str, int] = {}


def main(channel: int, modules: Sequence[str]) -> NoReturn:
    plugin.register()
    early.load(modules)
    if num := _other_threads():
        sys.exit(f"{num} threads besides the main one: a copy would lack them")
    _say(channel, Said())
    wanted = msgspec.json.decode(_line(), type=list[Wanted])
    pids = {}
    for one in wanted:
        if not (pid := os.fork()):
            os.close(channel)
            _become(one)
        pids[one.name] = pid
    _say(channel, Said(pids))
    # At once: tidying up what it has imported is of no use to anybody, and the copies wait for its end.
    os._exit(0)


def _become(one: Wanted) -> NoReturn:
    """Be this worker, as if it had been started by itself."""
    os.setsid()
    if not os.read(0, 1):
        os._exit(0)
    with open(one.log, "ab") as log, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(one.module)
    os.environ.clear()
    os.environ.update(one.environment)
    sys.argv = [one.module]
    core = early.CopiedProcess()
    service.run(one.name, partial(importlib.import_module(f"{one.module}.__main__").main, core=core))


def _other_threads() -> int:
    return len(os.listdir("/proc/self/task")) - 1


def _say(channel: int, said: Said) -> None:
    os.write(channel, msgspec.json.encode(said) + b"\n")


def _line() -> bytes:
    """One line of the input, and no byte after it. Ends the process where there is none."""
    found = b""
    while not found.endswith(b"\n"):
        some = os.read(0, LINE_BYTES)
        if not some:
            sys.exit(0)
        found += some
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
