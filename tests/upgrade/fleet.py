"""Services of several builds over one broker, each replaced by that of another build where it stands."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pdq import subjects
from pdq.bus import Bus
from pdq.messages import TERMINAL
from pdq.settings import LimitSettings

from tests.stack import Service, Stack
from tests.upgrade.builds import ADDED, Build, present
from tests.upgrade.traffic import Asked

LIMITS = LimitSettings(ack_wait_s=1.5, worker_ttl_s=2.5)
SETTINGS = {
    # Less than an answer takes: those under way go on with a worker of another build.
    "PDQ_WORKER_DRAIN_S": "0.2",
    "PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100*3",
}
MODULES = ("pdq_router", "pdq_prefill", "pdq_decode", "pdq_decode", "pdq_gateway", "pdq_gateway")
ROUTER_FIRST = (0, 1, 2, 3, 4, 5)
WORKERS_FIRST = (3, 2, 1, 0, 5, 4)
GATEWAYS_FIRST = (5, 4, 3, 2, 1, 0)
READERS_FIRST = (5, 4, 0, 1, 2, 3)
"""Places in `MODULES`."""


class Fleet:
    """A router, workers and gateways; a fixture of a test starts and stops it."""

    def __init__(self, directory: Path, build: Build, modules: Sequence[str] = MODULES, **settings: str) -> None:
        own: dict[str, Any] = {**SETTINGS, **settings}
        self.stack = Stack(directory, limits=LIMITS, **own)
        for module in modules:
            # Settings of a gateway are unknown to releases that have none.
            more = {"PDQ_GATEWAY_DRAIN_S": "30"} if module == "pdq_gateway" else {}
            self._set(self.stack.add(module, **more), build)

    def _set(self, service: Service, build: Build) -> None:
        # What an earlier release did not have yet is of this one.
        build = build if build.has(service.module) else present()
        place = self.stack.services.index(service)
        service.environment = {
            **service.environment,
            "PYTHONPATH": build.path,
            "PDQ_WORKER_ID": f"{service.module}-{place}-{build.name}",
        }

    @property
    def gateways(self) -> list[str]:
        return [service.api for service in self.stack.services if service.module == "pdq_gateway"]

    def add(self, module: str, build: Build) -> Service:
        service = self.stack.add(module)
        self._set(service, build)
        return service

    async def replace(self, place: int, build: Build) -> None:
        """Stop a service in order, and start it of another build."""
        service = self.stack.services[place]
        code = await asyncio.to_thread(service.stop, 40)
        assert code == 0, service.log.read_text()[-2_000:]
        self._set(service, build)
        service.start()
        await asyncio.to_thread(service.wait_ready)


class Seen(NamedTuple):
    """What the broker holds at the end."""

    ends: dict[str, list[str]]
    """Terminal events by request."""
    crossed: int
    """Requests that were worked on by more than one build."""
    continued: int
    """Requests whose answers more than one build has decoded."""
    records: Counter[str]
    """Records of the log by version, and those with the field that only later builds write."""
    dead: int


async def look(fleet: Fleet) -> Seen:
    bus = await fleet.stack.connect()
    try:
        return await _look(bus)
    finally:
        await bus.close()


async def _look(bus: Bus) -> Seen:
    builds: dict[str, set[str]] = {}
    decoded: dict[str, set[str]] = {}
    ends: dict[str, list[str]] = {}
    records = Counter[str]()
    async for request, record in _records(bus):
        records[f"v{record.get('v', 1)}"] += 1
        records[ADDED] += ADDED in record
        worker = record.get("worker", "").rpartition("-")[2]
        if record.get("event") == "claim":
            builds.setdefault(request, set()).add(worker)
            if record.get("stage") == "decode":
                decoded.setdefault(request, set()).add(worker)
        if record.get("event") in TERMINAL:
            ends.setdefault(request, []).append(record["event"])
    info = await bus.stream_info(subjects.DEAD)
    dead = int((info or {}).get("state", {}).get("messages", 0))
    crossed, continued = (sum(len(each) > 1 for each in found.values()) for found in (builds, decoded))
    return Seen(ends, crossed, continued, records, dead)


async def _records(bus: Bus) -> Any:
    """Request and record of everything in the log, whatever its version."""
    after = 0
    while page := await bus.read(subjects.LOG, "pdq.log.>", after=after, limit=1_000):
        for stored in page:
            yield subjects.parse_log(stored.subject).request, msgspec.json.decode(stored.data)
        after = page[-1].seq


def violations(asked: Sequence[Asked], seen: Seen) -> list[str]:
    """Everything that is wrong; empty when no request has noticed anything."""
    found = [f"{one.request or 'not accepted'}: {one.wrong}" for one in asked if one.wrong]
    found += [f"{request} ended as {ends}" for request, ends in seen.ends.items() if ends != ["finished"]]
    found += [f"{one.request} has no end" for one in asked if one.request and one.request not in seen.ends]
    told = {one.request for one in asked}
    found += [f"{request} ran, and nobody was told" for request in seen.ends if request not in told]
    return found + ([f"{seen.dead} dead letters"] if seen.dead else [])
