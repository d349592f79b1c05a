"""`python -m tests.soak`: see docs/soak.md. Exit codes: 0 all well, 1 something is wrong, 130 interrupted."""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tests.soak.report import Report
from tests.soak.run import Setup, run

INTERRUPTED = 130
LEAST_MINUTES = 1.0
"""Of measured time: a slope over less says nothing."""


def main() -> int:
    options = _options()
    setup = Setup(
        minutes=options.minutes,
        warm_up_minutes=options.warm_up,
        seed=secrets.randbelow(2**20) if options.seed is None else options.seed,
        rate=options.rate,
    )
    if options.dir is not None:
        options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="pdq-soak-", dir=options.dir))
    print(f"seed {setup.seed}, samples in {directory / 'samples.csv'}", file=sys.stderr)
    logging.getLogger("pdq").setLevel(logging.ERROR)
    _end_on_signals()
    try:
        report = _with_progress(setup, directory)
    except KeyboardInterrupt:
        print(f"interrupted; samples and logs are in {directory}", file=sys.stderr)
        return INTERRUPTED
    except AssertionError as exc:
        print(f"{exc}\nsamples and logs are in {directory}", file=sys.stderr)
        return 1
    (directory / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _show(report, options.json)
    print(f"samples and logs are in {directory}", file=sys.stderr)
    return 0 if report.ok else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("-m", "--minutes", type=float, default=60.0, help="under load (default: %(default)g)")
    parser.add_argument("-w", "--warm-up", type=float, default=15.0, help="minutes not measured (default: %(default)g)")
    parser.add_argument("--rate", type=float, help="requests a second (default: half of what the stack could take)")
    parser.add_argument("-s", "--seed", type=int, help="repeats a run's requests (default: a new one)")
    parser.add_argument("--dir", type=Path, help="where to make the run's directory (default: the temporary one)")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    options = parser.parse_args()
    if options.rate is not None and options.rate <= 0:
        parser.error("--rate must be above 0")
    if options.warm_up < 0 or options.minutes < options.warm_up + LEAST_MINUTES:
        parser.error(f"--minutes must be at least {LEAST_MINUTES:g} more than --warm-up")
    return options


def _end_on_signals() -> None:
    """SIGTERM ends a run as Ctrl-C does, which a background process may have been told to ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def _with_progress(setup: Setup, directory: Path) -> Report:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def progress(what: str, done: float, of: float) -> None:
            bar.update(task, completed=done, total=of, description=what)

        # As the services: asyncio's own loop takes 256 KiB for each read, and what it leaves between is never used
        # again where smaller messages stay; its memory grows by 2 MB in 10 minutes with nothing more in use.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(setup, directory, progress))


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print("\n".join(report.lines()))


if __name__ == "__main__":
    sys.exit(main())
