"""The timers of all requests that have not ended, set again: after streams were restored from a backup.

What the log has and the queues of the backup lack has no job and may have no timer: nothing would ever end it.
"""

from __future__ import annotations

import contextlib
import time

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import UNREADABLE
from pdq.messages import State, decode_json

from pdq_router.timers import Timers

PAGE = 1_000


async def rearm(bus: Bus) -> int:
    """Set the timer of each request that has not ended, to its deadline; returns how many there are.

    One that still has its job goes on as before. Raises Unavailable.
    """
    timers = Timers(bus)
    waiting = await _unended(bus)
    for (tenant, request), deadline in waiting.items():
        await timers.set(tenant, request, max(deadline, time.time()))
    return len(waiting)


async def _unended(bus: Bus) -> dict[tuple[str, str], float]:
    """Deadlines by tenant and request."""
    found: dict[tuple[str, str], float] = {}
    after, more = 0, True
    while more:
        page = await bus.read(subjects.LOG, subjects.state("*", "*"), after=after, limit=PAGE)
        for stored in page:
            after = stored.seq
            where = subjects.parse_log(stored.subject)
            with contextlib.suppress(*UNREADABLE):
                state = decode_json(stored.data, State)
                found[where.tenant, where.request] = state.deadline
                if state.ended:
                    del found[where.tenant, where.request]
        more = len(page) == PAGE
    return found
