"""`pdq explain`: why a request went the way it did, and what came of it."""

from __future__ import annotations

from typing import Annotated

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run


def explain(
    request: Annotated[str, typer.Argument(metavar="ID", help="The request's id.")],
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Tell why a request went the way it did: its order, the reason, what it was decided from, and what came of it.

    \b
    Examples:
      pdq explain r-3f2a
      pdq explain r-3f2a --json | jq .estimates_ms
    """
    with reported(as_json):
        from pdq import settings
        from pdq.cli import connect, explaining
        from pdq.cli.prompt import check_request
        from pdq.client import Client
        from pdq.messages import State

        where = connect.target(nats_url)
        name = check_request(request, reserved=True)

        async def work() -> list[State]:
            async with connect.bus(where) as bus:
                return await explaining.states(Client(bus, settings.tenant(where.environ)), name)

        found = explaining.explained(name, run(work))
        if as_json:
            output.json(found)
        else:
            output.line(explaining.text(found))
