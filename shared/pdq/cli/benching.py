"""What `pdq bench` does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from pdq import settings
from pdq.bench import calibrate, generator, metrics, over_http, plots, records, traces, workload
from pdq.bench.drive import Drive, Options
from pdq.bench.over_http import OverHttp
from pdq.bench.over_nats import OverNats
from pdq.bench.prompts import Prompts
from pdq.bench.records import Record
from pdq.bench.table import table
from pdq.bench.target import Api, Target
from pdq.bench.workload import Load
from pdq.cli import connect, exits, output
from pdq.cli.bench_progress import shown
from pdq.cli.running import Stopped, run
from pdq.cli.submitting import choose_model
from pdq.client import ORDER_HEADER, PRIORITY_HEADER, Client
from pdq.errors import Rejected

API_KEY = "OPENAI_API_KEY"
RATE, DURATION_S, INPUT_TOKENS, OUTPUT_TOKENS = 1.0, 60.0, 512, 128
"""Where nothing else is said."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as the command line describes it. 0, "" and None: not said."""

    url: str
    api: Api
    model: str
    rate: float
    arrivals: str | None
    input_tokens: int | None
    output_tokens: int | None
    generate: generator.Name | None
    replay: Path | None
    trace_format: traces.Format | None
    speed: float
    seed: int
    duration_s: float
    requests: int
    warm_up_s: float
    goodput: tuple[str, ...]
    order: str
    priority: str
    ignore_eos: bool
    timeout_s: float
    max_in_flight: int
    api_key_file: Path | None
    plot: Path | None
    save: Path | None

    @property
    def drive(self) -> Options:
        return Options(self.timeout_s, self.max_in_flight, self.warm_up_s)

    @property
    def fields(self) -> dict[str, Any]:
        """Of each body, besides its prompt and length."""
        return {"temperature": 0.0} | ({"ignore_eos": True} if self.ignore_eos else {})


def run_bench(wanted: Wanted, nats_url: str, as_json: bool, environ: Mapping[str, str] = os.environ) -> int:
    """Run it, report, and return the exit code. Raises PdqError, OSError and OutputClosed."""
    check(wanted)
    slos, load = metrics.slos(wanted.goodput), load_of(wanted)
    if wanted.plot is not None:
        plots.check()
    found: list[Record] = []
    code = exits.OK
    try:
        run(lambda: _measure(wanted, nats_url, environ, load, found, bar=not as_json))
    except Stopped as exc:
        code = 128 + exc.number
        output.note("stopped: this is what was measured so far")
    summary = metrics.summarise(found, slos)
    _report(wanted, summary, as_json)
    if wanted.save is not None:
        records.write(wanted.save, found)
    if wanted.plot is not None:
        plots.write(wanted.plot, found, summary, slos)
    return code or (exits.OK if summary.completed else exits.FAILED)


def check(wanted: Wanted) -> None:
    """Raise Rejected for options that do not go together."""
    replay, lengths = wanted.replay is not None, wanted.input_tokens or wanted.output_tokens
    for wrong, param, message in (
        (replay and wanted.generate, "replay", "either --replay or --generate makes the load"),
        (replay and wanted.rate, "rate", "a replay has times of its own: --speed changes them"),
        (replay and wanted.arrivals, "arrivals", "a replay has times of its own: --speed changes them"),
        ((replay or wanted.generate) and lengths, "input-tokens", "lengths are the trace's"),
        (not replay and wanted.speed != 1, "speed", "--speed is for a --replay; use --rate"),
        (not replay and wanted.trace_format, "format", "--format is for a --replay"),
        (
            not wanted.generate and wanted.arrivals == "bursty",
            "arrivals",
            "bursty arrivals are those of a trace: name one with --generate",
        ),
    ):
        if wrong:
            raise Rejected(message, code="usage", param=param)
    if wanted.url and not wanted.url.startswith(("http://", "https://")):
        raise Rejected(f"{wanted.url!r} is no URL of http", code="usage", param="url")


def load_of(wanted: Wanted) -> Load:
    """The requests of a run, in the order of their times. Raises Rejected, or OSError."""
    random = Random(wanted.seed)
    if wanted.replay is not None:
        endless = iter(workload.faster(traces.read(wanted.replay, wanted.trace_format), wanted.speed))
    elif wanted.generate and wanted.arrivals in (None, "bursty"):
        endless = generator.generate(wanted.generate, random, wanted.rate)
    else:
        rate = wanted.rate or (generator.PROFILES[wanted.generate].rate if wanted.generate else RATE)
        times = workload.constant(rate) if wanted.arrivals == "constant" else workload.poisson(rate, random)
        if wanted.generate:
            endless = generator.timed(wanted.generate, times, random)
        else:
            endless = workload.alike(times, wanted.input_tokens or INPUT_TOKENS, wanted.output_tokens or OUTPUT_TOKENS)
    bounded = wanted.requests or wanted.replay is not None
    duration_s = wanted.duration_s or (0.0 if bounded else DURATION_S)
    load = workload.within(endless, warm_up_s=wanted.warm_up_s, duration_s=duration_s, requests=wanted.requests)
    return workload.checked(load, wanted.warm_up_s)


async def _measure(
    wanted: Wanted, nats_url: str, environ: Mapping[str, str], load: Load, found: list[Record], *, bar: bool
) -> None:
    async with _target(wanted, nats_url, environ) as target:
        prompts = Prompts(target.api, target.model, wanted.fields)
        prompts.scale = await calibrate.measure(target, prompts, wanted.timeout_s)
        with shown(len(load), bar=bar) as progress:

            def take(record: Record) -> None:
                found.append(record)
                progress.ended(record)

            await Drive(target, prompts, wanted.drive, take).run(load)


@contextlib.asynccontextmanager
async def _target(wanted: Wanted, nats_url: str, environ: Mapping[str, str]) -> AsyncIterator[Target]:
    if wanted.url:
        async with over_http.session(_headers(wanted, environ)) as http:
            model = wanted.model or await over_http.first_model(http, wanted.url)
            yield OverHttp(http, wanted.url, model, wanted.api)
        return
    where = connect.target(nats_url, environ)
    async with connect.bus(where) as bus:
        client = Client(bus, settings.tenant(environ))
        model = choose_model(where, wanted.model)
        yield OverNats(client, model, wanted.api, order=wanted.order, priority=wanted.priority)


def _headers(wanted: Wanted, environ: Mapping[str, str]) -> dict[str, str]:
    key = environ.get(API_KEY, "")
    if wanted.api_key_file is not None:
        key = wanted.api_key_file.read_text("utf-8").strip()
    named = {ORDER_HEADER: wanted.order, PRIORITY_HEADER: wanted.priority}
    named["Authorization"] = f"Bearer {key}" if key else ""
    return {"Content-Type": "application/json"} | {name: value for name, value in named.items() if value}


def _report(wanted: Wanted, summary: metrics.Summary, as_json: bool) -> None:
    if as_json:
        output.json(msgspec.to_builtins(summary))
    else:
        output.line(table(summary, wanted.rate))
    if summary.held:
        message = f"{summary.held} requests waited for --max-in-flight {wanted.max_in_flight}: the loop was not open,"
        output.note(f"pdq: {message} and latencies are lower than they would have been")
