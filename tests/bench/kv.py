"""`python -m tests.bench.kv`: what moving KV costs in each mode, against memcpy and against the bare store.

Real engines, on one core each, with their LMCache servers. Each prompt is new. All ways of one prompt are taken one
after the other, so that a ratio is one of neighbours. KV that does not move as it should ends the run: exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from pdq.settings import ModelSpec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.bench import handoff, hops, output
from tests.bench.kv_report import ModeResult, Report
from tests.e2e.conftest import default_model

HOPS = 50
LOG_LINES = 30
INTERRUPTED = 130

Tick = Callable[[str, int], None]
"""Told what is being done, and how many prompts were done since."""


def main() -> int:
    options = _options()
    spec = default_model()
    if max(options.tokens) >= spec.max_model_len or min(options.tokens) < spec.chunk_tokens:
        print(f"--tokens must be from {spec.chunk_tokens} to {spec.max_model_len - 1}", file=sys.stderr)
        return 2
    try:
        report = _measured(options, spec)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    output.put(report, as_json=options.json)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", type=_modes, default=list(handoff.MODES), help=",".join(handoff.MODES))
    parser.add_argument(
        "--tokens", type=_numbers, default=[64, 256, 512, 1000, 1800], help="prompt lengths (64,256,512,1000,1800)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each prompt length (%(default)s)")
    output.add_json(parser)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if unknown := set(modes) - set(handoff.MODES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return modes


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _measured(options: argparse.Namespace, spec: ModelSpec) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = len(options.modes) * len(options.tokens) * options.repeats
    with (
        tempfile.TemporaryDirectory(prefix="pdq-bench-") as directory,
        _aside(Path(directory) / "engines.log") as stderr,
        Progress(*columns, console=Console(file=stderr), transient=True, auto_refresh=False) as bar,
    ):
        task = bar.add_task("starting", total=total)

        def tick(doing: str, done: int) -> None:
            bar.update(task, description=doing, advance=done)
            bar.refresh()

        return asyncio.run(run(options, spec, Path(directory), tick))


@contextlib.contextmanager
def _aside(log: Path) -> Iterator[TextIO]:
    """What engines and servers write to stdout and stderr goes to a log, whose end is shown when something fails.

    Yields the stderr of before.
    """
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    with log.open("wb") as file, os.fdopen(os.dup(2), "w") as stderr:
        for fd in kept:
            os.dup2(file.fileno(), fd)
        try:
            yield stderr
        except BaseException as exc:
            if not isinstance(exc, KeyboardInterrupt):
                tail = log.read_text("utf-8", "replace").splitlines()[-LOG_LINES:]
                print("the end of what the engines said:", *tail, sep="\n", file=stderr)
            raise
        finally:
            sys.stdout.flush()
            for fd, copy in kept.items():
                os.dup2(copy, fd)
                os.close(copy)


async def run(options: argparse.Namespace, spec: ModelSpec, directory: Path, tick: Tick) -> Report:
    """All modes, one after the other; each is ended in any case."""
    load, results, kv_bytes = os.getloadavg()[0], list[ModeResult](), 0
    tick("durable hops", 0)
    (broker := directory / "broker").mkdir()
    hops_s = await hops.durable_s(broker, HOPS)
    for mode in options.modes:
        tick(f"{mode}: starting", 0)
        async with handoff.running(mode, spec, directory / mode) as bench:
            results.append(await _mode(mode, bench, options, tick))
            kv_bytes = bench.kv_bytes_per_token
    return Report(
        load_before=load,
        load_after=os.getloadavg()[0],
        cores=os.cpu_count() or 1,
        model=f"{spec.id}, {spec.dtype}",
        kv_bytes_per_token=kv_bytes,
        repeats=options.repeats,
        hops_s=hops_s,
        results=results,
    )


async def _mode(mode: str, bench: handoff.Bench, options: argparse.Namespace, tick: Tick) -> ModeResult:
    samples = []
    await bench.warm_up(max(options.tokens))
    for number in range(options.repeats):
        for tokens in options.tokens:
            tick(f"{mode}: {tokens} tokens", 0)
            samples.append(await bench.sample(tokens, plain_first=number % 2 == 0))
            tick(f"{mode}: {tokens} tokens", 1)
    return ModeResult(mode=mode, load=os.getloadavg()[0], samples=samples)


if __name__ == "__main__":
    sys.exit(main())
