"""The processes of a run, and their deaths."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pdq.settings import LimitSettings

from tests.resume.plan import DECODES, GATEWAYS
from tests.stack import MODELS, Service, Stack

LIMITS = LimitSettings(ack_wait_s=1.5, worker_ttl_s=2.5, max_deliver=1_000)
PROFILE = "llama3-8b-h100*8"
"""About 50 ms a token."""
STARTS = 60
LOG_TAIL = 2_000
NOTICED_S = 0.1
"""In which those that were served by what was killed notice it."""
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

    async def kill_gateway(self, number: int) -> None:
        await self._kill(self._gateways[number])

    async def kill_decode(self, worker: str) -> None:
        """By the worker's id, as logs have it."""
        await self._kill(next(each for each in self._decodes if each.environment["PDQ_WORKER_ID"] == worker))

    async def kill_broker(self) -> None:
        await asyncio.to_thread(self.stack.broker.kill)
        await asyncio.to_thread(self.stack.broker.start)
        self.done["broker"] += 1

    async def _kill(self, service: Service) -> None:
        """And start it again; it need not be ready when this returns."""
        await asyncio.to_thread(service.kill)
        service.start()
        self.done[service.module.removeprefix("pdq_")] += 1
        await asyncio.sleep(NOTICED_S)

    async def ready(self) -> None:
        """Until everything is up again."""
        await _ready(self.stack.services)

    async def gateways_ready(self) -> None:
        await _ready(self._gateways)

    def troubles(self) -> list[str]:
        """What no process may do: end by itself, or fail to answer a request with a refusal."""
        found = [
            f"{service.module} ended by itself:\n{service.log.read_text()[-LOG_TAIL:]}"
            for service in self.stack.services
            if service.process is None or service.process.poll() is not None
        ]
        for gateway in self._gateways:
            log = gateway.log.read_text()
            if "Traceback" in log or "level=error" in log:
                found.append(f"a gateway logged an error:\n{log[-LOG_TAIL:]}")
        return found


async def _ready(services: Sequence[Service]) -> None:
    await asyncio.gather(*map(_up, services))


async def _up(service: Service) -> None:
    """While a service is down, anything else on the machine may have its port: it is started until it has it again."""
    for _ in range(STARTS):
        try:
            return await asyncio.to_thread(service.wait_ready)
        except AssertionError:
            if "address already in use" not in service.log.read_text()[-LOG_TAIL:]:
                raise
            await asyncio.sleep(1.0)
            service.start()
    raise AssertionError(f"{service.module} does not get its port {service.port} back")


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
        stack.add(module, PDQ_WORKER_ID=f"{module}-{len(stack.services)}").ready_s = START_S
    return stack
