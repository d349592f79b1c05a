"""`python -m tests.chaos`: see docs/chaos.md. Exit codes: 0 all well, 1 something is wrong, 130 interrupted."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos import plan
from tests.chaos.faults import Faults
from tests.chaos.report import Report
from tests.chaos.run import run

INTERRUPTED = 130


def main() -> int:
    options = _options()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    planned = plan.make(seed, options.requests, options.rate, options.trouble)
    if options.plan:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(planned)) + b"\n")
        return 0
    directory = Path(tempfile.mkdtemp(prefix="pdq-chaos-", dir=options.dir))
    print(f"seed {seed}, {len(planned.faults)} faults within {planned.span_s:.0f} s, in {directory}", file=sys.stderr)
    # The clients' own connections break again and again: that is the point.
    logging.getLogger("pdq").setLevel(logging.ERROR)
    try:
        report = _with_progress(planned, directory)
    except KeyboardInterrupt:
        print(f"interrupted; logs are in {directory}", file=sys.stderr)
        return INTERRUPTED
    (directory / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _show(report, options.json)
    if report.ok and not options.keep:
        shutil.rmtree(directory)
    else:
        print(f"logs are in {directory}", file=sys.stderr)
    return 0 if report.ok else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("-n", "--requests", type=int, default=1_000, help="how many requests (default: %(default)s)")
    parser.add_argument("-s", "--seed", type=int, help="repeats a run's requests and faults (default: a new one)")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--trouble", type=float, default=1.0, help="so many times the usual faults (default: 1)")
    parser.add_argument("--dir", type=Path, help="where to make the run's directory (default: the temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep that directory when all is well, too")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    parser.add_argument("--plan", action="store_true", help="print the plan as JSON, and do nothing")
    options = parser.parse_args()
    if options.requests < 1 or options.rate <= 0 or options.trouble <= 0:
        parser.error("--requests, --rate and --trouble must be above 0")
    return options


def _with_progress(planned: plan.Plan, directory: Path) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=len(planned.asks))

        def progress(ended: int, faults: Faults) -> None:
            told = f"{faults.count('kill')} kills, {faults.count('broker')} broker restarts"
            bar.update(task, completed=ended, description=told)

        return asyncio.run(run(planned, directory, progress))


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print("\n".join(report.lines()))


if __name__ == "__main__":
    sys.exit(main())
