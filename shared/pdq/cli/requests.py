"""`pdq submit`, `pdq attach`, `pdq cancel` and `pdq trace`: one request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

RequestId = Annotated[str, typer.Argument(metavar="ID", help="The request's id.")]


def submit(
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The text; - or none: from stdin.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from it.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="Default: the only one served.")] = "",
    system: Annotated[str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", help="The longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="0: always the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="Sample from this share of the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of the sampling; default: from the id.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    deadline: Annotated[float | None, typer.Option(metavar="SECONDS", help="End it after so long.")] = None,
    priority: Annotated[Literal["high", "normal", "low"] | None, typer.Option(help="Its queue.")] = None,
    order: Annotated[
        Literal["auto", "prefill-first", "decode-first", "decode-only"] | None,
        typer.Option(help="Its way through the stages; auto: what is estimated to be the soonest."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the prompt as it is, without a chat template.")] = False,
    request: Annotated[str, typer.Option("--id", metavar="ID", help="Name it; a repeated name is not run twice.")] = "",
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Print the answer as it comes.")] = True,
    timings: Annotated[bool, typer.Option("--timings", help="Print a table of times on stderr.")] = False,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Submit a prompt and print its answer.

    stdout carries the answer alone; everything else goes to stderr. Ctrl-C cancels the request.

    \b
    Examples:
      pdq submit "What is the capital of France?"
      pdq submit -f article.txt --system "Summarise in three sentences." --max-tokens 120
      git diff | pdq submit --system "Write a commit message." --temperature 0
      pdq submit --json "Hello" | jq -r .text
      pdq submit --timings --order decode-only "Hello"     # without the handoff, to compare
    """
    with reported(as_json):
        from pdq.cli import connect, submitting
        from pdq.cli.prompt import Ask, check_request, read

        ask = Ask(
            prompt=read(prompt, file, sys.stdin.buffer),
            model=model,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop=tuple(stop or ()),
            raw=raw,
            request=check_request(request) if request else "",
            deadline_s=deadline,
            priority=priority or "",
            order=order or "",
        )
        raise typer.Exit(submitting.submit(connect.target(nats_url), ask, submitting.Shown(as_json, stream, timings)))


def attach(
    request: RequestId,
    after: Annotated[int, typer.Option(metavar="SEQ", min=0, help="Print only what came after this sequence.")] = 0,
    timings: Annotated[bool, typer.Option("--timings", help="Print a table of times on stderr.")] = False,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Follow a request that runs, or read one that has ended: its whole answer is in the log.

    Ctrl-C stops the following, not the request.

    \b
    Examples:
      pdq attach r-3f2a
      pdq attach r-3f2a --json | jq .usage
    """
    with reported(as_json):
        from pdq.cli import connect, submitting
        from pdq.cli.prompt import check_request

        shown = submitting.Shown(as_json, timings=timings)
        name = check_request(request, reserved=True)
        raise typer.Exit(submitting.attach(connect.target(nats_url), name, after, shown))


def cancel(request: RequestId, as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """End a request, wherever it is. One that has ended already stays as it is.

    \b
    Example:
      pdq cancel r-3f2a
    """
    with reported(as_json):
        from pdq import settings
        from pdq.cli import connect, follow
        from pdq.cli.prompt import check_request
        from pdq.client import Client

        where = connect.target(nats_url)

        async def work() -> str:
            async with connect.bus(where) as bus:
                client = Client(bus, settings.tenant(where.environ))
                return await follow.cancel(client, check_request(request, reserved=True))

        event = run(work)
        if as_json:
            output.json({"id": request, "state": event})
        else:
            output.line(event)


def trace(
    request: RequestId,
    jaeger: Annotated[
        str, typer.Option(metavar="URL", help="Ask this Jaeger; default: the local files, then $PDQ_JAEGER_URL.")
    ] = "",
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Show where a request's time went: a line per span, from the local stack's trace files or from a Jaeger.

    ID is a request's, or a trace's own: then no broker is asked for it.

    \b
    Examples:
      pdq trace r-3f2a
      pdq trace r-3f2a --json | jq .total_ms
      pdq trace r-3f2a --jaeger http://127.0.0.1:16686
    """
    with reported(as_json):
        from pdq.cli import tracing

        run(lambda: tracing.show(request, as_json, jaeger, nats_url))
