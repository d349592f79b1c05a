"""The stack under test: a broker, and real services as processes, each behind a proxy of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pdq import subjects
from pdq.bus import Bus
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.broker import Broker
from tests.chaos import plan
from tests.chaos.proxy import Proxy
from tests.stack import MODEL, MODELS

ROOT = Path(__file__).resolve().parents[2]
LIMITS = LimitSettings(ack_wait_s=1.5, worker_ttl_s=2.5, max_deliver=1_000, log_age_s=86_400)
DRAIN_S = 1.0
EXIT_S = 30.0
"""How long a process may take to end after SIGTERM: its drain time, and its bounded waits after that."""
START_S = 60.0
SETTINGS = {
    "PDQ_ENGINE_KIND": "sim",
    # All that KV can do: answers' is saved, and that of waiting handoffs staged.
    "PDQ_KV_MODE": "pool",
    "PDQ_KV_SAVE_DECODE": "true",
    "PDQ_WORKER_DRAIN_S": str(DRAIN_S),
    # Random kills alone must not use up a request's attempts.
    "PDQ_WORKER_MAX_ATTEMPTS": "100",
    "PDQ_LIMIT_ACK_WAIT_S": str(LIMITS.ack_wait_s),
    "PDQ_LIMIT_WORKER_TTL_S": str(LIMITS.worker_ttl_s),
    "PDQ_LIMIT_MAX_DELIVER": str(LIMITS.max_deliver),
}
PROFILES = {"prefill": "llama2-70b-h100-tp8*10", "decode": "llama3-8b-h100*4"}
"""About 400 ms a prompt and 25 ms a token: most faults of a busy worker fall into the middle of its work."""


class Node:
    """One service, started anew as often as wanted. `command`: what Python is to run of it."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], directory: Path) -> None:
        self.name = name
        self.role = name.partition("-")[0]
        self.log = directory / f"{name}.log"
        self.busy = False
        """Some fault has it: no other process fault may begin."""
        self.wanted = False
        """Whether it should be running."""
        self.starts = 0
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        self.wanted = True
        self.starts += 1
        with open(self.log, "ab") as out:
            out.write(f"---- start {self.starts} at {time.time():.3f}\n".encode())
            out.flush()
            self._process = subprocess.Popen(
                [sys.executable, *self._command], env=self._environment, stdout=out, stderr=out, cwd=ROOT
            )

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.wanted = False
        self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(10)

    async def terminate(self) -> int | None:
        """SIGTERM, and wait for the end. Returns the exit code; None when it had to be killed."""
        self.wanted = False
        self.send(signal.SIGTERM)
        give_up = time.monotonic() + EXIT_S
        while self.alive and time.monotonic() < give_up:
            await asyncio.sleep(0.05)
        if self.alive:
            self.kill()
            return None
        return self.exit_code

    @property
    def handles_signals(self) -> bool:
        """Whether the newest process got as far as its own signal handlers."""
        return "msg=started" in self._newest_log()

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self._newest_log().splitlines()[-lines:])

    def _newest_log(self) -> str:
        return self.log.read_text("utf-8", "replace").rpartition("---- start")[2]


class Cluster:
    """All processes, their proxies, and proxies for the clients. `start`, then `stop` in any case."""

    def __init__(
        self,
        directory: Path,
        names: Iterable[str] | None = None,
        mutations: Mapping[str, str] | None = None,
        profiles: Mapping[str, str] | None = None,
    ) -> None:
        """names: the nodes, by default those of a plan. By name: what is taken out of a node (`mutant`), and the
        engine profile it has instead of its role's."""
        self.directory = directory
        self.broker = Broker(directory)
        self.nodes: dict[str, Node] = {}
        self.proxies: dict[str, Proxy] = {}
        self.troubles: list[str] = []
        """What no process may do: end by itself, or not end when told to."""
        self._names = list(plan.nodes() if names is None else names)
        self._mutations = mutations or {}
        self._profiles = PROFILES | dict(profiles or {})
        self._supervisor: asyncio.Task[None] | None = None
        self._at_broker: asyncio.Future[None] | None = None
        (directory / "models.toml").write_text(MODELS)
        (directory / "kv").mkdir()

    async def start(self, *, later: Iterable[str] = ()) -> None:
        """Everything up but the nodes named `later`, streams made, workers known. Raises what keeps it from that."""
        await self.at_broker(self.broker.start)
        for name in (*self._names, *plan.clients()):
            self.proxies[name] = Proxy(self.broker.port)
            await self.proxies[name].start()
        bus = await self.connect()
        try:
            await init(bus, LIMITS, [MODEL])
            self.nodes = {name: self._node(name) for name in self._names}
            now = [node for node in self.nodes.values() if node.name not in later]
            for node in now:
                node.start()
            self._supervisor = asyncio.create_task(self._supervise())
            await self._wait_for_workers(bus, sum(node.role != "router" for node in now))
        finally:
            await bus.close()

    def _node(self, name: str) -> Node:
        kept = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONDONTWRITEBYTECODE") if key in os.environ}
        role = name.partition("-")[0]
        environment = {
            **kept,
            **SETTINGS,
            "PDQ_ENGINE_SIM_PROFILE": self._profiles.get(name) or self._profiles.get(role, "instant"),
            "PDQ_NATS_URL": self.proxies[name].url,
            "PDQ_MODELS": str(self.directory / "models.toml"),
            "PDQ_ENGINE_SIM_KV_DIR": str(self.directory / "kv"),
            "PDQ_WORKER_ID": name,
        }
        mutation = self._mutations.get(name)
        program = ["tests.chaos.mutant", mutation, f"pdq_{role}"] if mutation else [f"pdq_{role}"]
        return Node(name, ["-m", *program], environment, self.directory)

    async def connect(self, url: str = "", name: str = "chaos") -> Bus:
        return await Bus.connect(BusSettings(url=url or self.broker.url), name)

    async def stop(self) -> None:
        """End all processes in order, and note which did not end as they should; bounded."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        for node in self.nodes.values():
            node.send(signal.SIGCONT)
        running = [node for node in self.nodes.values() if node.alive]
        for node, code in zip(running, await asyncio.gather(*(n.terminate() for n in running)), strict=True):
            self.note_exit(node, code)
        await self._close()

    async def abandon(self) -> None:
        """End all processes at once."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        for node in self.nodes.values():
            node.kill()
        await self._close()

    async def _close(self) -> None:
        for proxy in self.proxies.values():
            await proxy.close()
        if self._at_broker is not None:
            await asyncio.wait({self._at_broker})
        await self.at_broker(self.broker.stop)

    async def at_broker(self, do: Callable[[], None]) -> None:
        """Run a blocking call of the broker. It goes on when its caller is cancelled; the end waits for it."""
        self._at_broker = asyncio.ensure_future(asyncio.to_thread(do))
        await asyncio.shield(self._at_broker)

    def note_exit(self, node: Node, code: int | None) -> None:
        """After SIGTERM: only 0 is right, but for a process that was still being loaded."""
        if code != 0 and (node.handles_signals or code != -signal.SIGTERM):
            what = f"did not end within {EXIT_S:g} s" if code is None else f"ended with {code}"
            self.troubles.append(f"{node.name} {what} after SIGTERM:\n{node.tail()}")

    async def _supervise(self) -> None:
        """Start again what ends by itself, as any supervisor would; but it counts as trouble."""
        while True:
            for node in self.nodes.values():
                if node.wanted and not node.alive:
                    self.troubles.append(f"{node.name} ended by itself with {node.exit_code}:\n{node.tail()}")
                    node.start()
            await asyncio.sleep(0.2)

    async def _wait_for_workers(self, bus: Bus, wanted: int) -> None:
        give_up = time.monotonic() + START_S
        while True:
            info = await bus.stream_info(subjects.WORKERS, "$KV.PDQ_WORKERS.*.*.*")
            found = len((info or {}).get("state", {}).get("subjects") or {})
            if found >= wanted:
                return
            if time.monotonic() > give_up:
                raise AssertionError(f"only {found} of {wanted} workers came within {START_S:g} s")
            await asyncio.sleep(0.1)
