"""`pdq batch`: many requests from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported


def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines; - is stdin.")],
    to: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Results, added to; - is stdout.")],
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="NAME", help="Of lines that name none; default: the only one served."),
    ] = "",
    priority: Annotated[Literal["high", "normal", "low"], typer.Option(help="Their queue.")] = "low",
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Requests at one time.")] = 64,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Of a line, all its attempts together; also its deadline.")
    ] = 600.0,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Go on under this name, whatever else FILE holds; default: its content.")
    ] = "",
    cancel_on_interrupt: Annotated[
        bool, typer.Option("--cancel-on-interrupt", help="Ctrl-C purges what runs, in place of leaving it to go on.")
    ] = False,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Send the requests of a file, and write each answer as it comes.

    A line is OpenAI's batch shape (custom_id, method, url, body), or a body alone; a result has its custom_id, a
    status, and an error where there is no answer. Ctrl-C and crashes lose nothing: the same command goes on where it
    was, and runs nothing twice.

    Exit code 0: every line has its answer; 1: some have an error.

    \b
    Examples:
      pdq batch questions.jsonl -o answers.jsonl
      pdq batch questions.jsonl -o answers.jsonl --json | jq .failed
      make-questions | pdq batch - -o - --name nightly | jq -r .response.body.choices[0].message.content
    """
    with reported(as_json):
        from pdq.cli import batching, connect

        wanted = batching.Wanted(
            file=file,
            to=to,
            model=model,
            priority=priority,
            concurrency=concurrency,
            timeout_s=timeout,
            name=name,
            purge_on_interrupt=cancel_on_interrupt,
        )
        batching.check(wanted, as_json)
        raise typer.Exit(batching.run_batch(connect.target(nats_url), wanted, as_json))
