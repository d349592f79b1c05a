"""A real nats-server with JetStream for tests: started on a free port with a store of its own."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

from pdq.bus import Stored

FIRST_PORT, NUM_PORTS, MOST_WORKERS = 10_000, 20_000, 10
"""Below the ports that the kernel gives to connections: none of these is taken between its choice and its use."""

_given: set[int] = set()


def free_port() -> int:
    """A port that this process has given to nobody, of the share of this one of the test runner's processes."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % MOST_WORKERS
    share = NUM_PORTS // MOST_WORKERS
    while True:
        port = FIRST_PORT + number * share + random.randrange(share)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose last connections are closing may be taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def server_binary() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is not installed: run `make setup`"
    return found


class Broker:
    """`start`, `kill` (SIGKILL, the store is kept), `start` again; `stop` at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.more = ""
        """Further lines of its configuration."""
        self.jetstream = ""
        """Further lines of its JetStream's."""
        self.environment: dict[str, str] = {}
        """Variables that it has besides ours."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self.directory / "nats.conf"
        store = self.directory / "store"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{\nstore_dir: "{store}"\nmax_mem: 256MB\nmax_file: 20GB\n{self.jetstream}}}\n'
            f"{self.more}"
        )
        with open(self.directory / "nats.log", "ab") as out:
            self.process = subprocess.Popen(
                [server_binary(), "-c", str(config)], stdout=out, stderr=out, env={**os.environ, **self.environment}
            )
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError(f"nats-server did not start: {(self.directory / 'nats.log').read_text()}")

    def kill(self) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)


class Cluster:
    """Three brokers that replicate."""

    def __init__(self, directory: Path) -> None:
        self.brokers = [Broker(directory / f"n{number}") for number in range(3)]
        ports = [free_port() for _ in self.brokers]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        for number, (broker, port) in enumerate(zip(self.brokers, ports, strict=True)):
            broker.directory.mkdir()
            broker.more = (
                f'server_name: n{number}\ncluster {{ name: c, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'
            )

    @property
    def url(self) -> str:
        return ",".join(broker.url for broker in self.brokers)

    def start(self) -> None:
        for broker in self.brokers:
            broker.start()

    def stop(self) -> None:
        for broker in self.brokers:
            broker.stop()


def live_copy(stored: Stored, before: int) -> Stored:
    """Of a record that was read back; `before`: sequence of the one before it on its subject."""
    subject = stored.subject.replace("pdq.log", "pdq.live")
    return Stored(subject, stored.seq, stored.data, {"Nats-Last-Sequence": str(before)}, stored.time_s)
