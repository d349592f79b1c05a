"""The hub, as a site reaches it.

How long an acknowledgement takes depends on the line and on the hub's load, so there is no time after which a request
counts as lost: it is lost when a question that was asked later is answered. (Questions go one way, and are dealt with
in their order.) So the hub is asked while nothing is heard of it, and is sent nothing twice that is merely slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping

from pdq import subjects
from pdq.bus import Ack, Bus
from pdq.errors import NotStored, PdqError, Unavailable

from pdq_forwarder.metrics import ForwarderMetrics

log = logging.getLogger("pdq.forwarder")

MOST_WAIT_S = 120.0
LOOK_S = 0.1
ASK_EVERY_S, ASK_TIMEOUT_S = 0.5, 10.0
QUIET_S, IDLE_S = 1.0, 3.0
"""The hub is asked when nothing was heard of it for so long: while an acknowledgement is awaited, and otherwise."""
GRACE_S, MOST_GRACE_S = 0.25, 8.0
"""How long an acknowledgement may come after the answer to a later question: replicas take a moment. It doubles each
time that it was not enough, until one comes."""
NO_MODEL = "-"


class Uplink:
    """`submit`, and `run` beside it."""

    def __init__(self, bus: Bus, metrics: ForwarderMetrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._awaited = 0
        self._answered = 0.0
        """When the newest question was asked that has an answer."""
        self._heard_at = 0.0
        self._grace_s = GRACE_S
        self._lost_at = 0.0
        self._trouble: str | None = "the hub was not asked yet"

    async def submit(self, model: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Publish once; returns when the hub has stored it.

        Raises QueueFull, Rejected (it never takes this) or Unavailable (in doubt: it may have stored it).
        """
        asked = time.monotonic()
        work = self._bus.offer(subjects.hub_submit(model), body, headers=headers, timeout_s=MOST_WAIT_S)
        offer = asyncio.create_task(work)
        self._awaited += 1
        try:
            await self._wait(offer, asked)
            with self._hearing(asked):
                offer.result()
            self._grace_s = GRACE_S
        finally:
            self._awaited -= 1
            offer.cancel()

    async def check(self) -> None:
        """Raise Unavailable while the hub does not answer: for readiness."""
        if self._trouble is not None:
            raise Unavailable(self._trouble)

    async def run(self) -> None:
        """Ask the hub while nothing is heard of it, until cancelled."""
        asking: set[asyncio.Task[None]] = set()
        try:
            while True:
                if time.monotonic() - self._heard_at >= (QUIET_S if self._awaited else IDLE_S):
                    task = asyncio.create_task(self._ask())
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            for task in asking:
                task.cancel()

    async def _ask(self) -> None:
        with contextlib.suppress(PdqError), self._hearing(time.monotonic()):
            await self._bus.check_taken(subjects.hub_submit(NO_MODEL), timeout_s=ASK_TIMEOUT_S)

    async def _wait(self, offer: asyncio.Task[Ack], asked: float) -> None:
        """Until there is an answer. Raises Unavailable when there will be none."""
        give_up = math.inf
        while not (await asyncio.wait({offer}, timeout=LOOK_S))[0]:
            if self._answered > asked and give_up == math.inf:
                give_up = time.monotonic() + self._grace_s
            if time.monotonic() >= give_up:
                self._lose(asked)
                raise Unavailable("the request or its acknowledgement was lost on the way")

    def _lose(self, asked: float) -> None:
        """What was under way together counts once."""
        if asked > self._lost_at:
            self._lost_at = time.monotonic()
            self._grace_s = min(MOST_GRACE_S, 2 * self._grace_s)

    @contextlib.contextmanager
    def _hearing(self, asked: float) -> Iterator[None]:
        """Keep what became of a question. That nobody is there is an answer as well: the site's broker gives it."""
        try:
            yield
        except Unavailable as exc:
            if isinstance(exc, NotStored):
                self._hear(asked)
            if self._answered <= asked:
                self._tell(str(exc))
            raise
        except PdqError:
            self._hear(asked)
            self._tell(None)
            raise
        self._hear(asked)
        self._tell(None)

    def _hear(self, asked: float) -> None:
        self._answered = max(self._answered, asked)
        self._heard_at = time.monotonic()

    def _tell(self, trouble: str | None) -> None:
        """Say it when the hub goes and when it comes, not at every try."""
        if trouble is not None and self._trouble is None:
            log.warning("the hub does not answer; requests wait here: %s", trouble)
        elif trouble is None and self._trouble is not None:
            log.info("the hub answers", extra={"action": "forward.uplink"})
        self._trouble = trouble
        self._metrics.uplink(trouble is None)
