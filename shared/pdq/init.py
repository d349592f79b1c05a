"""`pdq init`: make the streams and durable consumers of a hub, or those of a site at the edge. Idempotent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Misconfigured, Unavailable
from pdq.settings import LimitSettings

PATIENCE_S = 30.0
"""How long a broker may take until it can make streams: a cluster must elect a leader first."""
RETRY_S = 0.25

T = TypeVar("T")


async def init(bus: Bus, limits: LimitSettings, models: list[str]) -> dict[str, str]:
    """Make everything the services need for these models (slugs).

    Returns, by name, `created`, `updated` or `unchanged`. Raises Misconfigured or Unavailable.
    """
    limits.check()
    sizes = limits.of_streams()
    give_up = time.monotonic() + PATIENCE_S
    await _patiently(partial(_refuse, bus, subjects.EDGE, "a site's: `pdq init --edge` makes what that needs"), give_up)
    return await _make(bus, subjects.streams(sizes), subjects.consumers(sizes, models), give_up)


async def init_edge(bus: Bus, limits: LimitSettings) -> dict[str, str]:
    """Make everything that a site's own broker needs; returns and raises as `init`."""
    sizes = limits.of_streams()
    give_up = time.monotonic() + PATIENCE_S
    await _patiently(partial(_refuse, bus, subjects.SUBMIT, "a hub's: `pdq init` makes what that needs"), give_up)
    first_seq = await _patiently(partial(_first_seq, bus), give_up)
    return await _make(bus, subjects.edge_streams(sizes, first_seq), subjects.edge_consumers(sizes), give_up)


async def _refuse(bus: Bus, stream: str, whose: str) -> None:
    """Raise Misconfigured for a broker of the other kind, which such a stream tells."""
    if await bus.stream_info(stream) is not None:
        raise Misconfigured(f"the broker at {bus.place} has a stream {stream}, so it is {whose}")


async def _first_seq(bus: Bus) -> int:
    """That of the stream, or for a new one the time in ms: one whose store was lost gives no name twice."""
    info = await bus.stream_info(subjects.EDGE)
    return int(time.time() * 1e3) if info is None else int(info["config"].get("first_seq", 0))


async def _make(
    bus: Bus, streams: Iterable[dict[str, Any]], consumers: Iterable[subjects.ConsumerSpec], give_up: float
) -> dict[str, str]:
    done = {}
    for config in streams:
        done[config["name"]] = await _patiently(partial(bus.ensure_stream, config), give_up)
    for stream, config in consumers:
        name = config["durable_name"]
        done[f"{stream}/{name}"] = await _patiently(partial(bus.ensure_consumer, stream, config), give_up)
    return done


async def _patiently(make: Callable[[], Coroutine[Any, Any, T]], give_up: float) -> T:
    while True:
        try:
            return await make()
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        await asyncio.sleep(RETRY_S)
