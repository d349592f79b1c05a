"""Asks a broker: what it is, what it holds, what time it has, who is alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import aiohttp

from pdq import subjects
from pdq.bus import Bus
from pdq.bus.wire import ApiError
from pdq.doctor.facts import Broker, Worker
from pdq.errors import Misconfigured, NewerVersion, NotDecodable, Unavailable
from pdq.messages import WorkerBeat, decode_json
from pdq.settings import LimitSettings

CLOCK_TRIES = 3
MAX_WORKERS = 10_000
HTTP_TIMEOUT_S = 2.0


class Clock(NamedTuple):
    """This machine's clock less the broker's, and how long the answer took, seconds."""

    skew_s: float | None
    rtt_s: float


async def ask(bus: Bus, limits: LimitSettings, models: Sequence[str], monitor: str) -> Broker:
    """All of it. Raises Unavailable, and Misconfigured for a site's broker; the caller bounds the whole.

    monitor: the monitoring port's URL; empty: it is not asked.
    """
    account = await _account(bus)
    if account is None:
        return Broker(place=bus.place, info=bus.server_info)
    if await bus.stream_info(subjects.EDGE) is not None:
        raise Misconfigured(f"the broker at {bus.place} is a site's; what must fit together is at the hub: ask that")
    sizes = limits.of_streams()
    names = [config["name"] for config in subjects.streams(sizes)]
    wanted = [(stream, config["durable_name"]) for stream, config in subjects.consumers(sizes, list(models))]
    clock = await _clock(bus, subjects.LOG)
    streams, consumers, (workers, newer), monitoring = await asyncio.gather(
        asyncio.gather(*(bus.stream_info(name) for name in names)),
        asyncio.gather(*(bus.consumer_info(*pair) for pair in wanted)),
        _workers(bus),
        _monitoring(monitor),
    )
    return Broker(
        place=bus.place,
        info=bus.server_info,
        account=account,
        streams=dict(zip(names, streams, strict=True)),
        consumers={f"{stream}/{name}": info for (stream, name), info in zip(wanted, consumers, strict=True)},
        skew_s=clock.skew_s,
        rtt_s=clock.rtt_s,
        workers=workers,
        newer=newer,
        monitoring=monitoring,
    )


async def _account(bus: Bus) -> dict[str, Any] | None:
    try:
        return await bus.api("INFO")
    except ApiError:
        return None
    except Unavailable:
        if bus.server_info.get("jetstream"):
            raise
        return None


async def _clock(bus: Bus, stream: str) -> Clock:
    """From the answer that came quickest. Only information of a stream carries the server's time."""
    clocks = []
    for _ in range(CLOCK_TRIES):
        began, before = time.time(), time.perf_counter()
        info = await bus.stream_info(stream)
        rtt_s = time.perf_counter() - before
        told = info.get("ts") if info is not None else None
        skew_s = began + rtt_s / 2 - datetime.fromisoformat(told).timestamp() if told else None
        clocks.append(Clock(skew_s, rtt_s))
    return min(clocks, key=lambda clock: clock.rtt_s)


async def _workers(bus: Bus) -> tuple[tuple[Worker, ...], tuple[str, ...]]:
    """Those that can be read, and the names of those that only a newer pdq reads."""
    try:
        stored = await bus.read(subjects.WORKERS, subjects.ALL_WORKERS, limit=MAX_WORKERS)
    except Unavailable:
        if await bus.stream_info(subjects.WORKERS) is None:
            return (), ()
        raise
    found, newer = [], set()
    for one in stored:
        with contextlib.suppress(NotDecodable):
            try:
                found.append(Worker(beat=decode_json(one.data, WorkerBeat), stored_s=one.time_s))
            except NewerVersion:
                newer.add(one.subject.rpartition(".")[2])
    found.sort(key=lambda worker: (worker.beat.model, worker.beat.stage, worker.beat.worker))
    return tuple(found), tuple(sorted(newer))


async def _monitoring(url: str) -> dict[str, Any] | None:
    """`/jsz` with its configuration; None: not asked, or no answer."""
    if not url:
        return None
    timeout = aiohttp.ClientTimeout(total=HTTP_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url.rstrip('/')}/jsz?config=true") as answer,
        ):
            found: dict[str, Any] = await answer.json(content_type=None)
            return found if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
