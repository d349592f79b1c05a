"""`python -m pdq_gateway`: OpenAI's HTTP API. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

import asyncio

from pdq import settings as config
from pdq.bus import Bus, connected
from pdq.client import Client
from pdq.errors import Unavailable
from pdq.service import Check, HealthServer, log_settings, run
from pdq.telemetry import Metrics, Telemetry
from pdq.tenants import Access, Directory

from pdq_gateway.app import make_app
from pdq_gateway.front import Front
from pdq_gateway.gateway import Gateway
from pdq_gateway.metrics import GatewayMetrics
from pdq_gateway.server import Server, make_server, serve
from pdq_gateway.tenancy import Refused

NOBODY = "nobody"
"""A request that there is not: whoever answers for it would answer for any."""
ROUTER_S = 1.0


class Service:
    """The parts of a gateway, wired."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.bus_settings = config.load(config.BusSettings)
        self.limits = config.load(config.LimitSettings)
        self.http = config.load(config.HttpSettings)
        self.gateway = config.load(config.GatewaySettings)
        self.trace = config.load(config.TelemetrySettings)
        log_settings(self.bus_settings, self.limits, self.http, self.gateway, self.trace)
        self.models = config.load_models(config.models_path())
        self.tenant = config.tenant()
        self.name = config.worker_id(config.load(config.WorkerSettings), "gateway")
        self.metrics = Metrics(self.models.by_slug)
        self.stop = stop
        self.bus: Bus | None = None
        self.server: Server | None = None

    async def run(self) -> None:
        telemetry = Telemetry.start("gateway", self.trace, self.name)
        checks = [
            Check("broker", self._check_broker),
            Check("http", self._check_http),
            Check("router", self._check_router, required=False, bound_s=ROUTER_S),
        ]
        try:
            async with (
                HealthServer(self.http, self.metrics, checks, self.stop),
                connected(self.bus_settings, f"pdq-{self.name}", self.stop) as bus,
            ):
                await self._serve(bus, telemetry)
        finally:
            await asyncio.to_thread(telemetry.close)

    async def _serve(self, bus: Bus, telemetry: Telemetry) -> None:
        tenants = Directory(bus)
        await tenants.start()
        access = Access(tenants, self.gateway.auth, host=self.gateway.host, local=self.tenant)
        access.check_start()
        gateway = Gateway(
            bus=bus,
            telemetry=telemetry,
            settings=self.gateway,
            limits=self.limits,
            models=self.models,
            access=access,
            refused=Refused(),
            over=asyncio.Event(),
        )
        app = Front(make_app(gateway), GatewayMetrics(self.metrics))
        async with asyncio.TaskGroup() as group:
            side = [group.create_task(bus.watch(self.stop)), group.create_task(tenants.run())]
            self.bus, self.server = bus, make_server(app, self.gateway)
            await serve(self.server, self.gateway, self.stop, gateway.over)
            for task in side:
                task.cancel()

    async def _check_broker(self) -> None:
        if self.bus is None:
            raise Unavailable("not connected to the broker yet")
        await self.bus.check()

    async def _check_http(self) -> None:
        if self.server is None or not self.server.started:
            raise Unavailable("not listening yet")

    async def _check_router(self) -> None:
        """Degraded where none answers, not unready: each gateway would be, and a client would learn nothing."""
        await self._check_broker()
        assert self.bus is not None
        await Client(self.bus, self.tenant).read(NOBODY, limit=1)


async def main(stop: asyncio.Event) -> None:
    await Service(stop).run()


if __name__ == "__main__":
    run("gateway", main)
