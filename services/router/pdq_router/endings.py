"""Ending a request in nobody's or a dead worker's place: for a cancel, a deadline, or a job given up."""

from __future__ import annotations

import contextlib
from typing import Any

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Unavailable
from pdq.log import Entry, RequestLog, Transcript, follow
from pdq.messages import State, StateEvent, Usage
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
        shown = await self._shown(tenant, request)
        ours = False

        def change(newest: Entry | None) -> State | None:
            nonlocal ours
            if newest is None or newest.state.ended:
                ours = False
                return None
            ours = True
            return follow(newest.state, event, **(_output(newest.state, shown) | fields))

        entry = await self._log.update(tenant, request, change)
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

    async def _shown(self, tenant: str, request: str) -> Transcript:
        shown = Transcript()
        while True:
            page = await self._log.read(tenant, request, after=shown.seq, limit=1_000)
            for event in page.events:
                shown.feed(event)
            if not page.more:
                return shown


def running(state: State) -> bool:
    """Whether some worker holds a claim on the request now."""
    return bool(state.prefill.owner or state.decode.owner)


def _output(state: State, shown: Transcript) -> dict[str, Any]:
    if not state.decode.attempt:
        return {}
    made = len(shown.ids)
    usage = Usage(prompt_tokens=state.prompt_tokens, completion_tokens=made, total_tokens=state.prompt_tokens + made)
    return {"num_tokens": made, "output_digest": shown.digest(), "usage": usage}
