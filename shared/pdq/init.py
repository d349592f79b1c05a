"""`pdq init`: make the streams and durable consumers, or bring them up to date. Idempotent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Unavailable
from pdq.settings import LimitSettings

PATIENCE_S = 30.0
"""How long a broker may take until it can make streams: a cluster must elect a leader first."""
RETRY_S = 0.25


async def init(bus: Bus, limits: LimitSettings, models: list[str]) -> dict[str, str]:
    """Make everything the services need for these models (slugs).

    Returns, by name, `created`, `updated` or `unchanged`. Raises Misconfigured or Unavailable.
    """
    limits.check()
    sizes = limits.of_streams()
    give_up = time.monotonic() + PATIENCE_S
    done = {}
    for config in subjects.streams(sizes):
        done[config["name"]] = await _patiently(partial(bus.ensure_stream, config), give_up)
    for stream, config in subjects.consumers(sizes, models):
        name = config["durable_name"]
        done[f"{stream}/{name}"] = await _patiently(partial(bus.ensure_consumer, stream, config), give_up)
    return done


async def _patiently(make: Callable[[], Coroutine[Any, Any, str]], give_up: float) -> str:
    while True:
        try:
            return await make()
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        await asyncio.sleep(RETRY_S)
