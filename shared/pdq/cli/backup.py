"""`pdq rearm`: what is left to do once streams were restored from a backup."""

from __future__ import annotations

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run


def rearm(as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """Set the deadline's timer of every request in the log that has not ended, after a restore.

    What waits in a queue goes on. What has lost its job in the restore ends at its deadline, instead of never. With
    accounts it needs the key of the router.

    \b
    Example:
      pdq rearm
    """
    with reported(as_json):
        from pdq_router.rearm import rearm as set_timers

        from pdq.cli import connect

        where = connect.target(nats_url)

        async def work() -> int:
            async with connect.bus(where) as bus:
                return await set_timers(bus)

        requests = run(work)
        if as_json:
            output.json({"requests": requests})
        else:
            output.note(f"{requests} requests have not ended; each ends at its deadline at the latest")
