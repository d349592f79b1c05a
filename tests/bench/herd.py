"""Many sim workers in one process: `python -m tests.bench.herd ROLE COUNT`, with a worker's environment.

Each has a connection, an engine, pulls, beats and subscriptions of its own, as `pdq.host.serve` makes them; what it
lacks is a process and a health server. The spans of all go to one exporter. It says `ready` once all are listed.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop
from pdq import settings as config
from pdq.engines.factory import create
from pdq.errors import Unavailable
from pdq.host import MakeHandler, Settings, _consumers, _Host
from pdq.messages import StageName
from pdq.service import Stop
from pdq.telemetry import Metrics, Start, Telemetry
from pdq_decode.handler import DecodeHandler
from pdq_prefill.handler import PrefillHandler

HANDLERS: dict[StageName, MakeHandler] = {"prefill": PrefillHandler, "decode": DecodeHandler}
STARTED_AT_ONCE = 20
LISTED_S = 60.0


async def serve(role: StageName, count: int) -> None:
    """Until SIGTERM."""
    stop, settings = Stop(), Settings.load()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    telemetry = Telemetry.start(role, settings.trace, config.worker_id(settings.worker, role))
    starting = asyncio.Semaphore(STARTED_AT_ONCE)
    try:
        async with asyncio.timeout(None) as bound, asyncio.TaskGroup() as group:
            hosts = [Host(role, number, settings, telemetry, stop) for number in range(count)]
            for host in hosts:
                group.create_task(host.run(starting))
            bound.reschedule(asyncio.get_running_loop().time() + LISTED_S)
            for host in hosts:
                await host.listed()
            bound.reschedule(None)
            print("ready", flush=True)
    finally:
        await asyncio.to_thread(telemetry.close)


class Host:
    """One worker of the herd."""

    def __init__(self, role: StageName, number: int, settings: Settings, telemetry: Telemetry, stop: Stop) -> None:
        spec = config.load_models(config.models_path()).one(settings.worker.model)
        self._role, self._slug, self._telemetry, self._stop = role, spec.slug, telemetry, stop
        self._name = f"{config.worker_id(settings.worker, role)}-{number}"
        self._engine = create(spec, role, settings.engine, settings.kv)
        self._host = _Host(settings, self._name, self._engine, Metrics([spec.slug]), Start(), stop)

    async def run(self, starting: asyncio.Semaphore) -> None:
        async with starting:
            connected = self._host.connected(self._name, _consumers(self._role, self._slug))
            await connected.__aenter__()
        try:
            async with self._host.engine_running(), self._host.parts(self._telemetry) as parts:
                await self._host.work({self._role: HANDLERS[self._role](self._engine, b"")}, parts)
        finally:
            await connected.__aexit__(None, None, None)

    async def listed(self) -> None:
        """Return once it takes jobs, and is on the list of workers."""
        while True:
            try:
                return await self._host._check_listed()
            except Unavailable:
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve("prefill" if sys.argv[1] == "prefill" else "decode", int(sys.argv[2])))
