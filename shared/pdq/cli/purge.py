"""`pdq purge`: remove what is stored of a request."""

from __future__ import annotations

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.requests import RequestId
from pdq.cli.running import reported, run
from pdq.messages import PurgeReply


def purge(request: RequestId, as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """End a request, and remove all that is stored of it: its log, its jobs, its dead letters.

    Nobody can read it afterwards. Its KV stays in the tiers until it is evicted; it holds no text.

    \b
    Examples:
      pdq purge r-3f2a
      pdq purge r-3f2a --json | jq .removed.events
    """
    with reported(as_json):
        from pdq import settings
        from pdq.cli import connect
        from pdq.cli.follow import not_found
        from pdq.cli.prompt import check_request
        from pdq.client import Client
        from pdq.errors import Unavailable

        name = check_request(request, reserved=True)
        where = connect.target(nats_url)

        async def work() -> PurgeReply:
            async with connect.bus(where) as bus:
                return await Client(bus, settings.tenant(where.environ)).purge(name)

        reply = run(work)
        if reply.error is not None:
            raise not_found(name) if reply.error.code == "not_found" else Unavailable(reply.error.message)
        removed = {field: getattr(reply.removed, field) for field in reply.removed.__struct_fields__}
        if as_json:
            output.json({"id": name, "event": reply.event or None, "removed": removed})
        else:
            told = ", ".join(f"{number} {field.replace('_', ' ')}" for field, number in removed.items() if number)
            output.note(f"removed {told}")
