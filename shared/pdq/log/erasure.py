"""Removing what is stored of a request: what a purge does, and whoever finds that he has written after one."""

from __future__ import annotations

from pdq import subjects
from pdq.bus import Bus
from pdq.messages import Removed

PAGE, PAGE_BYTES = 1_000, 512 << 10


async def erase(bus: Bus, tenant: str, request: str, *, keep_state: bool = False) -> Removed:
    """Remove a request's jobs, its dead letters and its log; what is gone already is fine. Raises Unavailable.

    The log goes last, and its state after its output: as long as that is there, a purge that was not finished finds the
    request again. keep_state: of the log, only the output.
    """
    jobs = await erase_jobs(bus, tenant, request)
    letters = await _erase(bus, subjects.DEAD, subjects.any_dead(tenant, request))
    events = await _erase(bus, subjects.LOG, subjects.out(tenant, request))
    if not keep_state:
        events += await _erase(bus, subjects.LOG, subjects.state(tenant, request))
    return Removed(jobs=jobs, dead_letters=letters, events=events)


async def erase_jobs(bus: Bus, tenant: str, request: str) -> int:
    """Remove what waits of a request, or is worked on, in the queues; returns how many jobs. Raises Unavailable."""
    prefill = await _erase_job(bus, subjects.PREFILL, subjects.any_job("prefill", tenant, request))
    return prefill + await _erase_job(bus, subjects.DECODE, subjects.any_job("decode", tenant, request))


async def _erase(bus: Bus, stream: str, subject: str) -> int:
    """Overwrite each message; the purge, which overwrites nothing, is for what a replica did not show."""
    number = 0
    while stored := await bus.read(stream, subject, limit=PAGE, max_bytes=PAGE_BYTES):
        removed = [await bus.delete(stream, message.seq, erase=True) for message in stored]
        number += sum(removed)
        if not any(removed):
            break
    return number + await bus.purge(stream, subject)


async def _erase_job(bus: Bus, stream: str, subject: str) -> int:
    number, stored = 0, await bus.first(stream, subject)
    while stored is not None:
        number += await bus.delete(stream, stored.seq, erase=True)
        stored = await bus.first(stream, subject, after=stored.seq)
    return number
