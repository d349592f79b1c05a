"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
NatsUrl = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="The broker; default: $PDQ_NATS_URL, else the stack that runs here.",
        show_default=False,
    ),
]
