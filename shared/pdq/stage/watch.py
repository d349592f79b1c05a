"""Watching the live states of requests: a cancel, an end or a newer claim stops running work at once.

What was heard last of a request is also what a claim of it tries first. It may be out of date, and then the
broker refuses the claim.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import NotDecodable
from pdq.log import UNREAD, Entry, Known
from pdq.messages import StageName, State, decode_json
from pdq.stage import claims
from pdq.stage.run import Run

log = logging.getLogger("pdq.stage")

NUM_HEARD = 1_024
"""Requests whose newest state is remembered until they are claimed here."""


class Watch:
    """One subscription per process, whatever it runs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._running: dict[tuple[str, str, StageName], tuple[Run, int]] = {}
        self._heard: dict[tuple[str, str], tuple[int, bytes]] = {}

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

    def heard(self, tenant: str, request: str) -> Known:
        """What was last heard of a request's state; it is forgotten here."""
        seq, data = self._heard.pop((tenant, request), (0, b""))
        with contextlib.suppress(NotDecodable):
            return Entry(seq, decode_json(data, State)) if seq else UNREAD
        return UNREAD

    def _on_state(self, stored: Stored) -> None:
        where = subjects.parse_log(stored.subject)
        self._remember((where.tenant, where.request), stored)
        stages: tuple[StageName, ...] = ("prefill", "decode")
        for stage in stages:
            if (found := self._running.get((where.tenant, where.request, stage))) is not None:
                self._judge(stored, stage, *found)

    def _remember(self, key: tuple[str, str], stored: Stored) -> None:
        self._heard.pop(key, None)
        self._heard[key] = (stored.seq, stored.data)
        if len(self._heard) > NUM_HEARD:
            del self._heard[next(iter(self._heard))]

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
