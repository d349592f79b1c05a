"""`pdq bench compare`: the same load on several set-ups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pdq.cli.options import AsJson
from pdq.cli.running import reported


def compare(
    setups: Annotated[
        str, typer.Option(metavar="a,b,...", help="Which; default: all, with --engine sim c,d,e.", show_default="all")
    ] = "",
    budgets: Annotated[
        str, typer.Option(metavar="N,N,...", help="More budgets of (a), under the mixed load; empty: none.")
    ] = "64,128,256,512",
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="All set-ups one after the other, so often.")] = 2,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="Of chats and mixed; half of it of short.")] = 40.0,
    warm_up: Annotated[float, typer.Option(metavar="S", min=0, help="Of each load, before what counts begins.")] = 6.0,
    chat_rate: Annotated[
        float | None, typer.Option(metavar="R", min=0.01, help="Chats a second; default: by the pace of one half.")
    ] = None,
    long_every: Annotated[
        float | None, typer.Option(metavar="S", min=0.1, help="From one long prompt to the next; default: as above.")
    ] = None,
    short_rate: Annotated[
        float | None,
        typer.Option(metavar="R", min=0.01, help="Requests a second of the third load; default: as above."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of times and lengths; prompts are new in each run.")] = 0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="Objectives for ttft, tpot, e2el: --goodput ttft:500 tpot:50"),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", metavar="NAME", help="As of `pdq up`."),
    ] = "",
    engine: Annotated[
        Literal["vllm", "sim"], typer.Option(help="sim: no weights, for tries; pdq's own set-ups alone.")
    ] = "vllm",
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Of a request; then it failed.")] = 180.0,
    start_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Until a set-up must be ready; then it is left out.")
    ] = 300.0,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the logs and traces of all set-ups there.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Write PNGs and one HTML page there.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each request's times, as JSON lines.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put the same load on several set-ups over the same cores or GPUs, and tell who wins where.

    \b
    a  one plain vLLM on all of them, chunked prefill with its default budget (and others, with --budgets)
    b  two plain vLLM replicas, a half each
    c  pdq decode-only, two decode workers
    d  pdq prefill-first, a prefill and a decode worker, KV through a pool
    e  pdq decode-first, the same workers
    f  pdq prefill-first, KV from peer to peer
    g  two vLLM servers with a connector of vLLM's own

    Before, a plain vLLM on one half of the machine is measured, unless all rates are given: the loads are what one half
    can bear. Each set-up is started, asked three loads (steady chats; the same with long prompts on top; many short
    prompts with longer answers), and ended, before the next one starts. Times are those of a client over HTTP. A set-up
    that does not start is a row with its error. Ctrl-C ends what runs, and reports what was measured.

    Exit code 0: measured; 1: no set-up counts.

    \b
    Examples:
      pdq bench compare
      pdq bench compare --setups a,d --budgets 256 --rounds 1 --goodput ttft:2000 tpot:200
      pdq bench compare --json --save requests.jsonl --plot plots
      pdq bench compare --engine sim --rounds 1 --seconds 10
    """
    with reported(as_json):
        from pdq.cli import comparing

        wanted = comparing.Wanted(
            setups=setups,
            budgets=budgets,
            rounds=rounds,
            seconds=seconds,
            warm_up_s=warm_up,
            chat_rate=chat_rate,
            long_every_s=long_every,
            short_rate=short_rate,
            seed=seed,
            goodput=tuple(goodput or ()),
            model=model,
            engine=engine,
            timeout_s=timeout,
            start_timeout_s=start_timeout,
            logs=logs,
            plot=plot,
            save=save,
        )
        raise typer.Exit(comparing.run_compare(wanted, as_json))
