"""Watching the live states of running requests: a cancel, an end or a newer claim stops the work at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import NotDecodable
from pdq.messages import StageName, State, decode_json
from pdq.stage import claims
from pdq.stage.run import Run

log = logging.getLogger("pdq.stage")


class Watch:
    """One subscription per process, whatever it runs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._running: dict[tuple[str, str, StageName], tuple[Run, int]] = {}

    async def start(self) -> None:
        await self._bus.follow(subjects.LIVE_STATES, self._on_state)

    @contextlib.contextmanager
    def running(self, tenant: str, request: str, stage: StageName, attempt: int, run: Run) -> Iterator[None]:
        """Interrupt `run` when its request is cancelled, ends, or is claimed anew."""
        key = (tenant, request, stage)
        self._running[key] = (run, attempt)
        try:
            yield
        finally:
            if self._running.get(key, (None, 0))[0] is run:
                del self._running[key]

    def _on_state(self, stored: Stored) -> None:
        where = subjects.parse_log(stored.subject)
        stages: tuple[StageName, ...] = ("prefill", "decode")
        for stage in stages:
            if (found := self._running.get((where.tenant, where.request, stage))) is not None:
                self._judge(stored, stage, *found)

    def _judge(self, stored: Stored, stage: StageName, run: Run, attempt: int) -> None:
        try:
            state = decode_json(stored.data, State)
        except NotDecodable as exc:
            log.warning("unreadable state record %s: %s", stored.seq, exc)
            return
        if state.event == "cancelling":
            run.interrupt("cancelled")
        elif state.ended:
            run.interrupt("ended")
        elif claims.of_stage(state, stage).attempt > attempt:
            run.interrupt("fenced")
