"""A hub with its services, a site with a forwarder, TLS and keys between them, and what may break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from pdq.bus import Bus
from pdq.client import Client, Submitted
from pdq.settings import LimitSettings

from tests.certificates import Authority
from tests.site import KeyedHub, Site
from tests.stack import Service

SITE = "plant"
LIMITS = LimitSettings(ack_wait_s=5.0, worker_ttl_s=5.0)
PROFILE = "llama3-8b-h100"

Breakable = Literal["uplink cut", "uplink silent", "leaf killed", "hub killed", "forwarder killed"]


class Scene:
    """Made by `opened`."""

    def __init__(self, directory: Path) -> None:
        self.hub = KeyedHub(directory, (SITE, "other"), authority=Authority(directory, "authority"))
        self.hub.limits = LIMITS
        self.site = Site(self.hub, SITE, limits=LIMITS, observed=("SITE",))
        self.hub.add("pdq_router")
        for worker in ("pdq_prefill", "pdq_decode"):
            self.hub.add(worker, PDQ_ENGINE_SIM_PROFILE=PROFILE)
        self.forwarder: Service = self.site.add("pdq_forwarder")

    async def break_for(self, what: Breakable, seconds: float) -> None:
        """Break it, wait, and mend it."""
        broken, mend = self._ways(what)
        await asyncio.to_thread(broken)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(mend)

    def _ways(self, what: Breakable) -> tuple[Callable[[], None], Callable[[], None]]:
        match what:
            case "uplink cut":
                return self.site.uplink.cut, self.site.uplink.heal
            case "uplink silent":
                return self.site.uplink.silent, self.site.uplink.heal
            case "leaf killed":
                return self.site.broker.kill, self.site.broker.start
            case "hub killed":
                return self.hub.broker.kill, self.hub.broker.start
            case "forwarder killed":
                return self.forwarder.kill, self.forwarder.start

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Noting]:
        """Of the site."""
        bus = await self.site.connect()
        try:
            yield Noting(bus, SITE)
        finally:
            await bus.close()

    @asynccontextmanager
    async def observer(self) -> AsyncIterator[Bus]:
        """At the hub, who may read all."""
        bus = await self.hub.connect("PDQ")
        try:
            yield bus
        finally:
            await bus.close()


class Noting(Client):
    """A client that notes the sequence under which the site's own queue first held each request."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        super().__init__(bus, tenant)
        self.seqs: dict[str, int] = {}

    async def submit(self, body: bytes, **options: Any) -> Submitted:
        submitted = await super().submit(body, **options)
        self.seqs.setdefault(submitted.request, submitted.seq)
        return submitted


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Scene]:
    """All of it started; nothing is left behind, whatever happens."""
    scene = Scene(directory)
    try:
        await scene.hub.start()
        await scene.site.start()
        yield scene
    finally:
        await asyncio.to_thread(scene.site.stop)
        await asyncio.to_thread(scene.hub.stop)
