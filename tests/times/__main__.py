"""`python -m tests.times`: each time measured again and again, over a real broker and real services.

The table goes to stdout, progress to stderr. Exit codes: 0 measured, 1 something failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.times import kill, outage, real, sim
from tests.times.report import Report, Row, Tell, Tick, shown

INTERRUPTED = 130

Measure = Callable[[Path, int, Tell, Tick], Awaitable[None]]
SIM: dict[str, Measure] = {"cancel": sim.measure, "kill": kill.measure, "broker": outage.measure}
REAL: dict[str, Measure] = {"cancel": real.measure}


def main() -> int:
    options = _options()
    # Connections break all the time here, and what breaks them is what is measured.
    logging.getLogger("pdq").setLevel(logging.ERROR)
    try:
        report = _measured(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        print("\n".join(report.lines()))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.times", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-r", "--repeats", type=int, default=10, help="of each time (default: %(default)s)")
    parser.add_argument("--only", choices=SIM, nargs="+", default=[], help="leave out the others")
    parser.add_argument("--engine", choices=("sim", "vllm"), default="sim", help="vllm: cancels alone (default: sim)")
    parser.add_argument("--json", action="store_true", help="all times as JSON on stdout")
    options = parser.parse_args()
    known = SIM if options.engine == "sim" else REAL
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if not known.keys() >= set(options.only):
        parser.error(f"with --engine {options.engine} there is {', '.join(known)} alone")
    options.measures = [measure for name, measure in known.items() if not options.only or name in options.only]
    return options


def _measured(options: argparse.Namespace) -> Report:
    load, rows = os.getloadavg()[0], list[Row]()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Redrawn with each time only: a thread that draws would be part of what is measured.
    with (
        tempfile.TemporaryDirectory(prefix="pdq-times-") as directory,
        Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar,
    ):
        task = bar.add_task("starting")

        def tick(doing: str) -> None:
            bar.update(task, description=doing)
            bar.refresh()

        def tell(row: Row) -> None:
            rows.append(row)
            bar.console.print(f"{row.what}, {row.place}: {shown(row.median_s)}", highlight=False, soft_wrap=True)

        async def run() -> None:
            for measure in options.measures:
                await measure(Path(directory), options.repeats, tell, tick)

        asyncio.run(run())
    return Report(
        engine=options.engine,
        load_before=load,
        load_after=os.getloadavg()[0],
        cores=os.cpu_count() or 1,
        rows=rows,
    )


if __name__ == "__main__":
    sys.exit(main())
