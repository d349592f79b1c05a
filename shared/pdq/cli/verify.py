"""`pdq verify`: whether the stack that runs answers as a plain engine does."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported


def verify(
    prompts: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How many.")] = 10,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, max=512, help="Of each answer.")] = 24,
    order: Annotated[
        Literal["prefill-first", "decode-first", "decode-only"], typer.Option(help="The way through the stages.")
    ] = "prefill-first",
    allow_recompute: Annotated[
        bool, typer.Option("--allow-recompute", help="Right tokens are enough, even where decode loaded no KV.")
    ] = False,
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="Default: the only one served.")] = "",
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Check that prefill, transfer and decode together answer as one plain engine does.

    The same prompts go through the stack that runs, and through a plain vLLM engine that this command starts (no
    connector, no KV from elsewhere; some GB of memory for a minute). Their greedy answers must be equal token for
    token, the first token's log probability to 0.001, and decode must have loaded the prompt's KV, not computed it.

    Exit code 0: all equal; 1: a difference, or KV that was not loaded.

    \b
    Examples:
      pdq verify
      pdq verify --prompts 50 --max-tokens 64
      pdq verify --order decode-first --json | jq '.prompts[] | select(.outcome != "equal")'
    """
    with reported(as_json):
        from pdq.cli import connect, verifying

        asked = verifying.Asked(prompts, max_tokens, order, allow_recompute, model)
        raise typer.Exit(verifying.verify(connect.target(nats_url), asked, as_json))
