"""A stack for tests: a real broker and the real services as processes, with the sim engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from pdq.bus import Bus
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.broker import Broker, Cluster, free_port

MODEL = "sim"
MODELS = """
[models.sim]
id = "pdq/sim"
tokenizer = "bytes"
max_model_len = 4096
vocab_size = 2048
"""


class Service:
    """One service process: its port, its log, its pid."""

    def __init__(self, module: str, directory: Path, environment: Mapping[str, str]) -> None:
        self.module = module
        self.port = free_port()
        self.log = directory / f"{module}-{self.port}.log"
        self.environment = {**environment, "PDQ_HTTP_PORT": str(self.port)}
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = 30.0

    @property
    def api(self) -> str:
        """Where a gateway serves OpenAI's API."""
        return f"http://127.0.0.1:{self.environment['PDQ_GATEWAY_PORT']}/v1"

    def start(self) -> None:
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module], env=self.environment, stdout=out, stderr=out
            )

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=3) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()
        except OSError as exc:
            return 0, str(exc)

    def wait_ready(self) -> None:
        give_up = time.monotonic() + self.ready_s
        while time.monotonic() < give_up:
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            if self.get("/readyz")[0] == 200:
                return
            time.sleep(0.05)
        raise AssertionError(f"{self.module} is not ready: {self.get('/readyz')}\n{self.log.read_text()}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, seconds: float = 20) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(seconds)


class Stack:
    """Broker, router and workers. Add services, `start`, and `stop` at the end."""

    def __init__(
        self,
        directory: Path,
        *,
        limits: LimitSettings | None = None,
        cluster: Cluster | None = None,
        **settings: str,
    ) -> None:
        self.directory = directory
        self.broker = Broker(directory)
        self.cluster = cluster
        self.services: list[Service] = []
        self.settings = settings
        self.limits = limits or LimitSettings()
        self.models = [MODEL]
        (directory / "models.toml").write_text(MODELS)
        (directory / "kv").mkdir(exist_ok=True)

    @property
    def url(self) -> str:
        return (self.cluster or self.broker).url

    def environment(self, service: str, **more: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
        return {
            **kept,
            "PDQ_NATS_URL": self.url,
            "PDQ_MODELS": str(self.directory / "models.toml"),
            "PDQ_ENGINE_KIND": "sim",
            "PDQ_ENGINE_SIM_KV_DIR": str(self.directory / "kv"),
            "PDQ_TRACE_FILE": str(self.directory / f"{service}.jsonl"),
            # What `auto` chooses depends on what was measured by then.
            "PDQ_ROUTER_ORDER": "prefill-first",
            "PDQ_LIMIT_ACK_WAIT_S": str(self.limits.ack_wait_s),
            "PDQ_LIMIT_WORKER_TTL_S": str(self.limits.worker_ttl_s),
            **self.settings,
            **more,
        }

    def add(self, module: str, **more: str) -> Service:
        if module == "pdq_gateway":
            more = {"PDQ_GATEWAY_PORT": str(free_port()), **more}
        service = Service(module, self.directory, self.environment(f"{module}-{len(self.services)}", **more))
        self.services.append(service)
        return service

    async def start(self) -> None:
        (self.cluster or self.broker).start()
        bus = await self.connect()
        await init(bus, self.limits, self.models)
        await bus.close()
        for service in self.services:
            service.start()
        for service in self.services:
            service.wait_ready()

    async def connect(self) -> Bus:
        return await Bus.connect(BusSettings(url=self.url), "test")

    def stop(self) -> None:
        for service in self.services:
            if service.process is not None and service.process.poll() is None:
                service.process.terminate()
        for service in self.services:
            if service.process is not None:
                try:
                    service.process.wait(20)
                except subprocess.TimeoutExpired:
                    service.kill()
        (self.cluster or self.broker).stop()

    def metric(self, service: Service, name: str) -> float:
        """The sum of a metric's samples, over all its labels."""
        lines = service.get("/metrics")[1].splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(map(float, values))


def chat(prompt: str, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": prompt}], **fields}).encode()


def completion(prompt: object, **fields: object) -> bytes:
    return json.dumps({"prompt": prompt, **fields}).encode()
