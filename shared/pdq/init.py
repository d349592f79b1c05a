"""`pdq init`: make the streams and durable consumers, or bring them up to date. Idempotent."""

from __future__ import annotations

from pdq import subjects
from pdq.bus import Bus
from pdq.settings import LimitSettings


async def init(bus: Bus, limits: LimitSettings, models: list[str]) -> dict[str, str]:
    """Make everything the services need for these models (slugs).

    Returns, by name, `created`, `updated` or `unchanged`. Raises Misconfigured or Unavailable.
    """
    limits.check()
    sizes = limits.of_streams()
    done = {}
    for config in subjects.streams(sizes):
        done[config["name"]] = await bus.ensure_stream(config)
    for stream, config in subjects.consumers(sizes, models):
        name = config["durable_name"]
        done[f"{stream}/{name}"] = await bus.ensure_consumer(stream, config)
    return done
