"""`python -m tests.edge`: see docs/edge.md. Exit codes: 0 all well, 1 something is wrong, 130 interrupted."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.edge.report import Report
from tests.edge.run import run

INTERRUPTED = 130


def main() -> int:
    options = _options()
    seed = secrets.randbelow(2**24) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="pdq-edge-"))
    print(f"seed {seed}, in {directory}", file=sys.stderr)
    # The client's own connection breaks as well: that is the point.
    logging.getLogger("pdq").setLevel(logging.ERROR)
    try:
        report = _with_progress(options, seed, directory)
    except KeyboardInterrupt:
        print(f"interrupted; logs are in {directory}", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print("\n".join(report.lines()))
    if report.ok:
        shutil.rmtree(directory)
    else:
        print(f"logs are in {directory}", file=sys.stderr)
    return 0 if report.ok else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.edge", description=__doc__)
    parser.add_argument("-n", "--requests", type=int, default=200, help="around the cut (default: %(default)s)")
    parser.add_argument("-s", "--seed", type=int, help="repeats a run's requests (default: a new one)")
    parser.add_argument("--cut", type=float, default=30.0, help="seconds without uplink (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="of the uplink's return (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args()
    if options.requests < 1 or options.rate <= 0 or options.cut <= 0 or options.repeats < 0:
        parser.error("--requests, --cut and --rate must be above 0, --repeats at least 0")
    return options


def _with_progress(options: argparse.Namespace, seed: int, directory: Path) -> Report:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")

        def tick(doing: str, done: int) -> None:
            bar.update(task, description=f"{doing}: {done}")

        return asyncio.run(
            run(
                directory,
                seed=seed,
                requests=options.requests,
                cut_s=options.cut,
                repeats=options.repeats,
                rate=options.rate,
                tick=tick,
            )
        )


if __name__ == "__main__":
    sys.exit(main())
