"""Asks, and checks each answer soon after its end, so that nothing of it stays."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from pdq.bus import Bus
from pdq.client import Client
from pdq.errors import PdqError
from pdq.settings import LimitSettings

from tests.chaos.asking import Asked, Asker, until_it_works
from tests.chaos.check import violations
from tests.chaos.plan import Ask
from tests.chaos.reference import reference
from tests.chaos.report import log_lines
from tests.chaos.run import read
from tests.soak.bad import DEAD_STAGE, BadRequests
from tests.soak.load import Bad
from tests.soak.report import Report

PATIENCE = 2.0
"""How many times the longest deadline a request may take before it counts as lost."""


class Asking:
    """`clients`: by tenant. `bus`: an operator's."""

    def __init__(self, clients: Mapping[str, Client], bus: Bus, limits: LimitSettings, report: Report) -> None:
        self._bound_s = limits.max_deadline_s * PATIENCE
        self._askers = {tenant: Asker(client, self._bound_s) for tenant, client in clients.items()}
        self._bads = {tenant: BadRequests(client, bus, self._bound_s) for tenant, client in clients.items()}
        self._bus = bus
        self._report = report
        self._late_s = 2 * limits.ack_wait_s
        """What a late writer still writes comes within this time."""
        self.outcomes: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()

    @property
    def ended(self) -> int:
        return self.outcomes.total() + self.bad.total()

    @property
    def dead_letters(self) -> int:
        """How many are due."""
        return sum(count for kind, count in self.bad.items() if kind in DEAD_STAGE)

    async def good(self, ask: Ask, starts: float) -> None:
        """Ask, wait for the end, and compare the stored log with the reference. `starts`: monotonic."""
        asked = Asked(ask)
        await self._askers[ask.tenant].run(asked, starts)
        await asyncio.sleep(self._late_s)
        try:
            async with asyncio.timeout(self._bound_s):
                # On a machine that other work holds up for seconds, one read may fail.
                events = await until_it_works(lambda: read(self._bus, ask))
        except TimeoutError:
            self._report.note_wrong(ask.request, [f"its log cannot be read within {self._bound_s:g} s"])
            return
        newest = next((event.state for event in reversed(events) if event.state is not None), None)
        self.outcomes[newest.event if newest is not None and newest.ended else "open"] += 1
        if found := violations(asked, reference(ask), events):
            self._report.note_wrong(f"{ask.tenant}/{ask.request}", found, log_lines(events))

    async def bad_one(self, bad: Bad, starts: float) -> None:
        """The same for a request that must fail."""
        await asyncio.sleep(max(0.0, starts + bad.at_s - time.monotonic()))
        try:
            async with asyncio.timeout(self._bound_s):
                found = await self._bads[bad.tenant].run(bad)
        except (PdqError, TimeoutError) as exc:
            found = [f"{type(exc).__name__}: {exc}"]
        self.bad[bad.kind] += 1
        if found:
            self._report.note_wrong(f"{bad.tenant}/{bad.kind}", found)
