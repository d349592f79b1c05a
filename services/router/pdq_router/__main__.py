"""`python -m pdq_router`: routes requests, serves read and cancel, and reaps. Settings: `PDQ_*` (pdq.settings)."""

from __future__ import annotations

import asyncio

from pdq import settings as config
from pdq import subjects
from pdq.bus import Bus, Puller, connected
from pdq.errors import Unavailable
from pdq.service import Check, HealthServer, log_settings, run
from pdq.stage import Admit, Loop
from pdq.stage.dead import DeadLetters
from pdq.telemetry import Metrics, Telemetry
from pdq.telemetry.broker import BrokerMetrics
from pdq.tenants import Directory
from pdq.tenants.feed import Feed
from pdq.tenants.limiter import Limiter
from pdq.tenants.usage import TenantUsage

from pdq_router.admission import Admission
from pdq_router.bypass import Bypass
from pdq_router.canary import sing
from pdq_router.endings import Endings
from pdq_router.endpoints import Endpoints
from pdq_router.gauges import Gauges
from pdq_router.prefixes import Prefixes
from pdq_router.reaper import Reaper
from pdq_router.route import Router
from pdq_router.shares import Shares
from pdq_router.tokens import Tokenizer, load_tokenizer

DRAIN_S = 10.0
STALL_S = 60.0
LATE_S = 60.0
"""How long after the longest deadline nothing is under way any more."""


class Service:
    """The parts of a router, wired."""

    def __init__(self, stop: asyncio.Event) -> None:
        self.bus_settings = config.load(config.BusSettings)
        self.limits = config.load(config.LimitSettings)
        self.limits.check()
        self.http = config.load(config.HttpSettings)
        self.router = config.load(config.RouterSettings)
        self.trace = config.load(config.TelemetrySettings)
        log_settings(self.bus_settings, self.limits, self.http, self.router, self.trace)
        self.models = config.load_models(config.models_path())
        self.worker = config.worker_id(config.load(config.WorkerSettings), "router")
        self.metrics = Metrics(self.models.by_slug)
        self.broker_metrics = BrokerMetrics(self.metrics, self.models.by_slug)
        self.stop = stop
        self.bus: Bus | None = None
        self.tokenizers: dict[str, Tokenizer] = {}
        self.listening = False

    async def run(self) -> None:
        telemetry = Telemetry.start("router", self.trace, self.worker)
        checks = [
            Check("broker", self._check_broker),
            Check("tokenizers", self._check_tokenizers),
            Check("endpoints", self._check_endpoints),
        ]
        try:
            async with (
                HealthServer(self.http, self.metrics, checks, self.stop),
                connected(self.bus_settings, f"pdq-{self.worker}", self.stop) as bus,
            ):
                await bus.check_consumers(
                    [(subjects.SUBMIT, subjects.ROUTER_CONSUMER), (subjects.REAP, subjects.REAPER_CONSUMER)]
                )
                self.bus = bus
                for slug, spec in self.models.by_slug.items():
                    self.tokenizers[slug] = await asyncio.to_thread(load_tokenizer, spec)
                await self._work(bus, telemetry)
        finally:
            await asyncio.to_thread(telemetry.close)

    async def _work(self, bus: Bus, telemetry: Telemetry) -> None:
        endings = Endings(bus, self.metrics)
        admission = Admission(bus, self.router.queue_limit)
        prefixes = Prefixes(self.router.known_positions)
        tenants, usage = Directory(bus), TenantUsage(self.limits.max_deadline_s + LATE_S)
        await tenants.start()
        feed = Feed(bus, usage, prefixes.hear)
        await feed.start()
        shares = Shares(usage, Limiter(usage, tenants.limits), tenants.others, self.router.fair_share)
        router = Router(
            bus,
            telemetry,
            self.metrics,
            self.router,
            self.limits,
            self.models,
            self.tokenizers,
            admission,
            shares,
            prefixes,
            self.worker,
        )
        reaper = Reaper(bus, endings, DeadLetters(bus, self.metrics, self.worker), self.metrics)
        await Endpoints(bus, endings).start()
        self.listening = True
        loops = [
            self._loop(Puller(bus, subjects.SUBMIT, [subjects.ROUTER_CONSUMER]), router, admission.wait_for_log),
            self._loop(Puller(bus, subjects.REAP, [subjects.REAPER_CONSUMER]), reaper),
        ]
        gauges = Gauges(bus, self.broker_metrics, tuple(self.models.by_slug))
        async with asyncio.TaskGroup() as group:
            side = [
                group.create_task(bus.watch(self.stop)),
                group.create_task(gauges.run()),
                group.create_task(tenants.run()),
                group.create_task(feed.run()),
                group.create_task(sing(bus, self.worker, self.limits.worker_ttl_s / 3)),
            ]
            if self.router.prefill_start_s:
                side.append(group.create_task(Bypass(bus, self.metrics, self.router.prefill_start_s).run()))
            await asyncio.wait([group.create_task(loop.run(self.stop)) for loop in loops])
            for task in side:
                task.cancel()

    def _loop(self, puller: Puller, work: Router | Reaper, admit: Admit | None = None) -> Loop:
        return Loop(
            puller,
            work.process,
            slots=self.router.slots,
            ack_wait_s=self.limits.ack_wait_s,
            stall_s=STALL_S,
            drain_s=DRAIN_S,
            admit=admit,
        )

    async def _check_broker(self) -> None:
        if self.bus is None:
            raise Unavailable("not connected to the broker yet")
        await self.bus.check_storing()

    async def _check_tokenizers(self) -> None:
        if len(self.tokenizers) < len(self.models.by_slug):
            raise Unavailable("the models' tokenizers are being loaded")

    async def _check_endpoints(self) -> None:
        if not self.listening:
            raise Unavailable("questions are not listened to yet")


async def main(stop: asyncio.Event) -> None:
    await Service(stop).run()


if __name__ == "__main__":
    run("router", main)
