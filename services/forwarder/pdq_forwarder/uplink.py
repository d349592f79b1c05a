"""The hub, as a site reaches it: one question at a time, and whether it answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import PdqError, Unavailable

from pdq_forwarder.metrics import ForwarderMetrics

log = logging.getLogger("pdq.forwarder")

ACK_S = 2.0
SLOWEST_BYTES_PER_S = 32 << 10
"""What is under way over an uplink as slow as this is waited for; slower ones take small requests only."""
SILENCE_S = 3.0
"""The hub is asked whether it is there when nothing was heard of it for so long."""
NO_MODEL = "-"


class Uplink:
    """`submit`, and `run` beside it."""

    def __init__(self, bus: Bus, metrics: ForwarderMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._bytes = 0
        """Of bodies under way."""
        self._asked = 0.0
        self._trouble: str | None = "the hub was not asked yet"

    async def submit(self, model: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Publish once; returns when the hub has stored it.

        Raises QueueFull, Rejected (it never takes this) or Unavailable (in doubt: it may have stored it).
        """
        self._bytes += len(body)
        try:
            with self._heard():
                wait_s = ACK_S + self._bytes / SLOWEST_BYTES_PER_S
                await self._bus.offer(subjects.hub_submit(model), body, headers=headers, timeout_s=wait_s)
        finally:
            self._bytes -= len(body)

    async def check(self) -> None:
        """Raise Unavailable while the hub does not answer: for readiness."""
        if self._trouble is not None:
            raise Unavailable(self._trouble)

    async def run(self) -> None:
        """Ask the hub while there is nothing to submit, until cancelled."""
        while True:
            if time.monotonic() - self._asked >= SILENCE_S:
                with contextlib.suppress(PdqError), self._heard():
                    await self._bus.check_taken(subjects.hub_submit(NO_MODEL), timeout_s=ACK_S)
            await asyncio.sleep(SILENCE_S / 3)

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        """Keep what became of a question. A refusal is an answer."""
        trouble = None
        try:
            yield
        except Unavailable as exc:
            trouble = str(exc)
            raise
        except asyncio.CancelledError:
            trouble = self._trouble
            raise
        finally:
            self._asked = time.monotonic()
            self._tell(trouble)

    def _tell(self, trouble: str | None) -> None:
        """Say it when the hub goes and when it comes, not at every try."""
        if trouble is not None and self._trouble is None:
            log.warning("the hub does not answer; requests wait here: %s", trouble)
        elif trouble is None and self._trouble is not None:
            log.info("the hub answers", extra={"action": "forward.uplink"})
        self._trouble = trouble
        self._metrics.uplink(trouble is None)
