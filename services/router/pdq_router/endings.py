"""Ending a request in nobody's or a dead worker's place: for a cancel, a deadline, or a job given up."""

from __future__ import annotations

import contextlib
from typing import Any

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Unavailable
from pdq.log import Entry, RequestLog, follow
from pdq.messages import State, StateEvent
from pdq.telemetry import Metrics


class Endings:
    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._log = RequestLog(bus)

    async def end(self, tenant: str, request: str, event: StateEvent, **fields: Any) -> Entry | None:
        """Write a terminal event with the tokens stored so far, and drop the queued job and the timer.

        Returns the newest record: ours, or the end that was there already; None when the log knows nothing.
        """

        def change(newest: Entry | None) -> State | None:
            return None if newest is None or newest.state.ended else follow(newest.state, event, **fields)

        entry, ours = await self._log.end(tenant, request, change)
        if entry is not None and ours:
            state = entry.state
            self._metrics.ended(state.model, state.order, state.event, state.lasted_s)
        if entry is not None and entry.state.ended:
            await self.drop(tenant, request)
        return entry

    async def drop(self, tenant: str, request: str) -> None:
        """Remove what is queued for an ended request. What stays is dropped by whoever takes it."""
        with contextlib.suppress(Unavailable):
            await self._bus.purge(subjects.PREFILL, subjects.any_job("prefill", tenant, request))
            await self._bus.purge(subjects.DECODE, subjects.any_job("decode", tenant, request))
            await self._bus.purge(subjects.REAP, subjects.timer(tenant, request))


def running(state: State) -> bool:
    """Whether some worker holds a claim on the request now."""
    return bool(state.prefill.owner or state.decode.owner)
