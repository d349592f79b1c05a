"""A Docker daemon for a test: the machine's own where one answers, else one that lives as long as the test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

GET_DOCKER = Path(__file__).with_name("get-docker.sh")
INSTALL_S = 900.0
START_S = 60.0
STOP_S = 60.0
INFO_S = 10.0


@contextlib.contextmanager
def daemon() -> Iterator[None]:
    """Sets DOCKER_HOST where it starts a daemon, which needs root; installs Docker where it is not."""
    if answers():
        yield
        return
    if os.getuid() != 0:
        raise SystemExit("no Docker daemon answers, and only root can start one")
    if not shutil.which("dockerd") or not plugin("compose") or not plugin("buildx"):
        subprocess.run([GET_DOCKER], check=True, timeout=INSTALL_S)
    folder = Path(mkdtemp(prefix="pdq-docker-", dir="/var/lib"))
    try:
        with started(folder):
            yield
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[None]:
    """A daemon whose images, containers and sockets lie in `folder`."""
    host = f"unix://{folder / 'sock'}"
    places = {"--host": host} | {f"--{name}": f"{folder / name}" for name in ("data-root", "exec-root", "pidfile")}
    command = ["dockerd", *(word for pair in places.items() for word in pair)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            os.environ["DOCKER_HOST"] = host
            deadline = time.monotonic() + START_S
            while not answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"dockerd did not start:\n{(folder / 'log').read_text('utf-8')[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            del os.environ["DOCKER_HOST"]
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)


def answers() -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
        return not subprocess.run(["docker", "info"], capture_output=True, timeout=INFO_S, check=False).returncode
    return False


def plugin(name: str) -> bool:
    """Whether `docker` has it."""
    with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
        command = ["docker", name, "version"]
        return not subprocess.run(command, capture_output=True, timeout=INFO_S, check=False).returncode
    return False
