"""`python -m pdq_forwarder`: at a site, forwards requests to the hub. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from pdq import settings as config
from pdq import subjects
from pdq.bus import Bus, Puller, connected
from pdq.errors import Misconfigured, Unavailable
from pdq.service import Check, HealthServer, log_settings, run
from pdq.stage import Loop
from pdq.telemetry import Metrics, Telemetry

from pdq_forwarder.forward import Forwarder
from pdq_forwarder.gauges import Gauges
from pdq_forwarder.metrics import ForwarderMetrics
from pdq_forwarder.uplink import Uplink
from pdq_forwarder.window import Window

MOST_UNDER_WAY = 64
DRAIN_S = 3.0
"""What is under way is acknowledged by then, or not at all."""


class Service:
    """The parts of a forwarder, wired."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.bus_settings = config.load(config.BusSettings)
        self.http = config.load(config.HttpSettings)
        self.trace = config.load(config.TelemetrySettings)
        log_settings(self.bus_settings, self.http, self.trace)
        self.worker = config.worker_id(config.load(config.WorkerSettings), "forwarder")
        self.metrics = Metrics(())
        self.counts = ForwarderMetrics(self.metrics)
        self.stop = stop
        self.bus: Bus | None = None
        self.uplink: Uplink | None = None

    async def run(self) -> None:
        telemetry = Telemetry.start("forwarder", self.trace, self.worker)
        checks = [Check("broker", self._check_broker), Check("uplink", self._check_uplink, required=False)]
        try:
            async with (
                HealthServer(self.http, self.metrics, checks, self.stop),
                connected(self.bus_settings, f"pdq-{self.worker}", self.stop) as bus,
            ):
                await self._check_consumer(bus)
                self.bus, self.uplink = bus, Uplink(bus, self.counts)
                await self._work(bus, self.uplink, telemetry)
        finally:
            await asyncio.to_thread(telemetry.close)

    async def _check_consumer(self, bus: Bus) -> None:
        stream, consumer = subjects.EDGE, subjects.FORWARDER_CONSUMER
        if await bus.patiently(partial(bus.consumer_info, stream, consumer)) is None:
            raise Misconfigured(f"consumer {consumer} of stream {stream} does not exist: run `pdq init --edge`")

    async def _work(self, bus: Bus, uplink: Uplink, telemetry: Telemetry) -> None:
        window = Window(MOST_UNDER_WAY)
        forwarder = Forwarder(uplink, window, telemetry, self.metrics, self.counts, self.worker)
        loop = Loop(
            Puller(bus, subjects.EDGE, [subjects.FORWARDER_CONSUMER]),
            forwarder.process,
            slots=MOST_UNDER_WAY,
            ack_wait_s=subjects.EDGE_ACK_WAIT_S,
            # An uplink may be down for days.
            stall_s=math.inf,
            drain_s=DRAIN_S,
            admit=window.room,
        )
        async with asyncio.TaskGroup() as group:
            side = [
                group.create_task(bus.watch(self.stop)),
                group.create_task(uplink.run()),
                group.create_task(Gauges(bus, self.counts).run()),
            ]
            await asyncio.wait([group.create_task(loop.run(self.stop))])
            for task in side:
                task.cancel()

    async def _check_broker(self) -> None:
        if self.bus is None:
            raise Unavailable("not connected to the broker yet")
        await self.bus.check()

    async def _check_uplink(self) -> None:
        if self.uplink is None:
            raise Unavailable("not connected to the broker yet")
        await self.uplink.check()


async def main(stop: asyncio.Event) -> None:
    await Service(stop).run()


if __name__ == "__main__":
    run("forwarder", main)
