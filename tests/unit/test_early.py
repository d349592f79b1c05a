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


COPIED = """
import multiprocessing, os, sys
from pdq.engines.early import CopiedProcess, _Context
core = CopiedProcess(())
process = _Context(multiprocessing.get_context("spawn"), core).Process(target=exec, args=({code!r},))
{{told}}
process.start()
process.join({bound})
print(process.pid == core.pid, process.exitcode)
"""


def copied(code: str, told: str = "") -> str:
    """What a program says that makes a process for `code` from a copy of itself; `told`: what it does before."""
    program = COPIED.format(code=code, bound=BOUND_S).replace("{told}", told)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=BOUND_S, check=True)
    return done.stdout.strip()


def test_a_copy_becomes_the_process_that_is_spawned() -> None:
    assert copied("import sys; sys.exit(7)") == "True 7"
    assert copied("import os; os.kill(os.getpid(), 9)") == "True -9"


def test_a_copy_has_the_environment_and_the_cpus_of_the_moment_of_its_start() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = f"import os; assert os.environ['TOLD_LATER'] == 'yes'; assert os.sched_getaffinity(0) == {{{cpu}}}"
    assert copied(code, f"os.environ['TOLD_LATER'] = 'yes'; os.sched_setaffinity(0, [{cpu}])") == "True 0"


def test_nothing_is_left_of_a_copy_that_nobody_took() -> None:
    code = "from pdq.engines.early import CopiedProcess as C; import os; c = C(()); print(c.pid, flush=True); {end}"
    for end in ("c.close()", "os._exit(0)"):
        program = [sys.executable, "-c", code.replace("{end}", end)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=BOUND_S, check=True)
        give_up = time.monotonic() + BOUND_S
        while psutil.pid_exists(int(done.stdout)):
            assert time.monotonic() < give_up
            time.sleep(0.05)
