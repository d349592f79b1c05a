"""A process that is begun before it is known what it is to do, and what `multiprocessing` then makes of it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from pdq.engines.early import EarlyProcess, _Context

BOUND_S = 30.0
MODULES = ("pdq.errors", "pdq.no_such_module")


@pytest.fixture
def early() -> Iterator[EarlyProcess]:
    process = EarlyProcess(MODULES)
    yield process
    process.close()


def spawner(early: EarlyProcess) -> _Context:
    return _Context(multiprocessing.get_context("spawn"), early)


def tell(path: Path) -> None:
    path.write_text(f"{os.getpid()} {os.environ.get('TOLD_LATER')} {'pdq.errors' in sys.modules}")


def fail() -> None:
    sys.exit(7)


def answer(pipe: Connection) -> None:
    pipe.send(os.getpid())


def test_it_becomes_the_process_that_is_spawned(
    early: EarlyProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOLD_LATER", "yes")
    process = spawner(early).Process(target=tell, args=(tmp_path / "told",))
    process.start()
    process.join(BOUND_S)
    assert process.exitcode == 0
    assert (tmp_path / "told").read_text() == f"{early.pid} yes True"
    early.close()


def test_its_end_is_seen_as_that_of_any_other(early: EarlyProcess) -> None:
    process = spawner(early).Process(target=fail)
    process.start()
    assert process.pid == early.pid
    process.join(BOUND_S)
    assert process.exitcode == 7


def test_it_can_be_terminated(early: EarlyProcess) -> None:
    process = spawner(early).Process(target=time.sleep, args=(BOUND_S,))
    process.start()
    assert process.is_alive()
    process.terminate()
    process.join(BOUND_S)
    assert process.exitcode and process.exitcode < 0


def test_only_the_first_process_is_the_one_that_waited(early: EarlyProcess, tmp_path: Path) -> None:
    context = spawner(early)
    processes = [context.Process(target=tell, args=(tmp_path / name,)) for name in ("first", "second")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(BOUND_S)
    pids = [int((tmp_path / name).read_text().split()[0]) for name in ("first", "second")]
    assert pids[0] == early.pid != pids[1]


def test_one_that_inherits_a_pipe_is_spawned_as_usual(early: EarlyProcess) -> None:
    context = spawner(early)
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs,))
    process.start()
    assert ours.poll(BOUND_S) and ours.recv() == process.pid != early.pid
    process.join(BOUND_S)
    ours.close()
    theirs.close()


def test_nothing_is_left_of_one_that_nobody_took() -> None:
    process = EarlyProcess(MODULES)
    process.close()
    process.close()
    assert not psutil.pid_exists(process.pid)


def test_it_does_not_outlive_whoever_began_it() -> None:
    code = "import os; from pdq.engines.early import EarlyProcess as E; print(E(()).pid, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    give_up = time.monotonic() + BOUND_S
    while psutil.pid_exists(int(done.stdout)):
        assert time.monotonic() < give_up
        time.sleep(0.05)
