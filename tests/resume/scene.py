"""The processes of a run, and their deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from pdq.settings import LimitSettings

from tests.resume.plan import DECODES, GATEWAYS, Part
from tests.stack import MODELS, Stack

LIMITS = LimitSettings(ack_wait_s=1.5, worker_ttl_s=2.5, max_deliver=1_000)
PROFILE = "llama3-8b-h100*4"
"""About 25 ms a token."""
START_S = 120.0
"""How long a process may take to be ready, on a machine that has much else to do."""


class Scene:
    """A stack whose gateways and decode workers die. It is made for one event loop; the stack is started apart."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.done: Counter[str] = Counter()
        """Deaths, by part."""
        self.quiet = asyncio.Lock()
        self._gateways = [service for service in stack.services if service.module == "pdq_gateway"]
        self._decodes = [service for service in stack.services if service.module == "pdq_decode"]

    @property
    def urls(self) -> list[str]:
        return [gateway.api for gateway in self._gateways]

    async def act(self, part: Part, number: int) -> None:
        """Kill, and start again; what is killed need not be ready before."""
        async with self.quiet:
            if part == "broker":
                await asyncio.to_thread(self.stack.broker.kill)
                await asyncio.to_thread(self.stack.broker.start)
            else:
                service = (self._gateways if part == "gateway" else self._decodes)[number]
                await asyncio.to_thread(service.kill)
                service.start()
            self.done[part] += 1

    async def ready(self) -> None:
        """Until everything is up again."""
        await asyncio.gather(*(asyncio.to_thread(service.wait_ready) for service in self.stack.services))

    def troubles(self) -> list[str]:
        """What no process may do: end by itself, or fail to answer a request with a refusal."""
        found = [
            f"{service.module} ended by itself:\n{service.log.read_text()[-2_000:]}"
            for service in self.stack.services
            if service.process is None or service.process.poll() is not None
        ]
        for gateway in self._gateways:
            log = gateway.log.read_text()
            if "Traceback" in log or "level=error" in log:
                found.append(f"a gateway logged an error:\n{log[-2_000:]}")
        return found


def simulated(directory: Path) -> Stack:
    """A broker, a router, two gateways, a prefill worker and two decode workers of the sim."""
    stack = Stack(
        directory,
        limits=LIMITS,
        PDQ_LIMIT_MAX_DELIVER=str(LIMITS.max_deliver),
        # Kills alone must not use up a request's attempts.
        PDQ_WORKER_MAX_ATTEMPTS="100",
        PDQ_ENGINE_SIM_PROFILE=PROFILE,
    )
    (directory / "models.toml").write_text(f'{MODELS}tool_parser = "sim"\n')
    for module in ("pdq_router", "pdq_prefill", *["pdq_decode"] * DECODES, *["pdq_gateway"] * GATEWAYS):
        stack.add(module).ready_s = START_S
    return stack
