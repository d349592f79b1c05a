"""`pdq bench`: what answers take under a load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from pdq.cli.compare import compare
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported
from pdq.errors import Rejected

OBJECTIVE = re.compile(r"[a-z0-9]+:[0-9.]+")


class BenchGroup(TyperGroup):
    """Takes `--goodput ttft:500 tpot:50` as well as the option repeated, as `vllm bench serve` does; so do its
    commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeated(args))


def repeated(args: list[str]) -> list[str]:
    """`--goodput` put before each objective that follows one."""
    made: list[str] = []
    follows = False
    for arg in args:
        objective = OBJECTIVE.fullmatch(arg) is not None
        made += ["--goodput", arg] if follows and objective and made[-1] != "--goodput" else [arg]
        follows = arg == "--goodput" or (follows and objective)
    return made


def bench(
    ctx: typer.Context,
    url: Annotated[str, typer.Option(metavar="URL", help="An OpenAI endpoint, with its /v1; default: NATS.")] = "",
    api: Annotated[Literal["completions", "chat"], typer.Option(help="The shape of requests.")] = "completions",
    model: Annotated[str, typer.Option("--model", "-m", metavar="NAME", help="Default: the first one served.")] = "",
    rate: Annotated[
        float, typer.Option(metavar="R", min=0, help="Requests a second; default 1, or as recorded.")
    ] = 0.0,
    arrivals: Annotated[
        Literal["poisson", "constant", "bursty"] | None,
        typer.Option(help="How they arrive; bursty: as --generate has it, and its default.", show_default="poisson"),
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Length of each prompt.", show_default="512")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Length of each answer.", show_default="128")
    ] = None,
    generate: Annotated[
        Literal["azure-code", "azure-conv", "mooncake"] | None, typer.Option(help="Lengths and times like a trace's.")
    ] = None,
    replay: Annotated[Path | None, typer.Option(metavar="FILE", help="Lengths and times of a trace.")] = None,
    trace_format: Annotated[
        Literal["azure", "mooncake", "burstgpt"] | None,
        typer.Option("--format", help="Its format; default: by its first line."),
    ] = None,
    speed: Annotated[float, typer.Option(metavar="F", min=0.001, help="Replay so many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of times and lengths; prompts are new in each run.")] = 0,
    duration: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Of the load; default: 60, or all that --requests or FILE has."),
    ] = 0.0,
    requests: Annotated[int, typer.Option(metavar="N", min=0, help="At most so many after the warm-up.")] = 0,
    warm_up: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Load that does not count, first.")] = 0.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="Objectives for ttft, tpot, e2el: --goodput ttft:500 tpot:50"),
    ] = None,
    order: Annotated[
        Literal["auto", "prefill-first", "decode-first", "decode-only"] | None, typer.Option(help="Pdq-Order of each.")
    ] = None,
    priority: Annotated[Literal["high", "normal", "low"] | None, typer.Option(help="Pdq-Priority of each.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of full length; vLLM's own field.")
    ] = True,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Of a request; then it failed.")] = 600.0,
    max_in_flight: Annotated[
        int, typer.Option(metavar="N", min=1, help="A bound for safety; it is told when it holds requests back.")
    ] = 10_000,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: $OPENAI_API_KEY, if set.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Write PNGs and one HTML page there.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each request's times, as JSON lines.")
    ] = None,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Put a load on an endpoint, and measure what its answers take.

    Requests are sent when they are due, whatever has become of those before (an open loop). The target is the stack
    that runs here, over NATS, or any OpenAI endpoint with --url. Ctrl-C ends what runs, and reports what was measured.

    Exit code 0: measured; 1: no request succeeded.

    \b
    Examples:
      pdq bench --rate 4 --duration 120 --warm-up 20 --goodput ttft:500 tpot:50
      pdq bench --url http://127.0.0.1:8000/v1 --api chat --rate 4 --input-tokens 2000
      pdq bench --generate mooncake --rate 2 --requests 200 --order prefill-first --json
      pdq bench --replay AzureLLMInferenceTrace_code.csv --speed 2 --duration 600 --save code.jsonl --plot plots
    """
    if ctx.invoked_subcommand is not None:
        with reported():
            _check_alone(ctx)
        return
    with reported(as_json):
        from pdq.cli import benching

        wanted = benching.Wanted(
            url=url.rstrip("/"),
            api=api,
            model=model,
            rate=rate,
            arrivals=arrivals,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            generate=generate,
            replay=replay,
            trace_format=trace_format,
            speed=speed,
            seed=seed,
            duration_s=duration,
            requests=requests,
            warm_up_s=warm_up,
            goodput=tuple(goodput or ()),
            order=order or "",
            priority=priority or "",
            ignore_eos=ignore_eos,
            timeout_s=timeout,
            max_in_flight=max_in_flight,
            api_key_file=api_key_file,
            plot=plot,
            save=save,
        )
        raise typer.Exit(benching.run_bench(wanted, nats_url, as_json))


def _check_alone(ctx: typer.Context) -> None:
    """Raise Rejected for options of `pdq bench` itself before one of its commands."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            message = f"options go behind `pdq bench {ctx.invoked_subcommand}`"
            raise Rejected(message, code="usage", param=name)


bench_commands = typer.Typer(cls=BenchGroup, invoke_without_command=True, rich_markup_mode=None)
bench_commands.callback()(bench)
bench_commands.command()(compare)
