"""`python -m tests.resume`: streams that are cut, resumed elsewhere, and must be whole. Exit codes: 0 all are, 1 some
are not, 130 interrupted."""

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

from tests.resume.plan import Plan, make
from tests.resume.report import Failure, Report
from tests.resume.run import run
from tests.resume.scene import Scene, simulated

INTERRUPTED = 130


def main() -> int:
    options = _options()
    plan = make(secrets.randbelow(2**32) if options.seed is None else options.seed, options.requests)
    directory = Path(tempfile.mkdtemp(prefix="pdq-resume-", dir=options.dir))
    print(f"seed {plan.seed}, {len(plan.rounds)} rounds, in {directory}", file=sys.stderr)
    # The run's own connection breaks with the broker: that is the point.
    logging.getLogger("pdq").setLevel(logging.ERROR)
    try:
        report = asyncio.run(_run(plan, directory))
    except KeyboardInterrupt:
        print(f"interrupted; logs are in {directory}", file=sys.stderr)
        return INTERRUPTED
    print("\n".join(report.lines()) if not options.json else msgspec.json.encode(report).decode())
    if report.ok:
        shutil.rmtree(directory)
    else:
        print(f"logs are in {directory}", file=sys.stderr)
    return 0 if report.ok else 1


async def _run(plan: Plan, directory: Path) -> Report:
    stack, shown = simulated(directory), list[Failure]()

    def told(report: Report) -> None:
        print(f"{report.requests} resumed, {report.left} left, {len(report.failures)} not whole", file=sys.stderr)
        for failure in report.failures[len(shown) :]:
            print("\n".join(failure.lines()), file=sys.stderr)
        shown[:] = report.failures

    try:
        await stack.start()
        return await run(plan, Scene(stack), told)
    finally:
        stack.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.resume", description=__doc__)
    parser.add_argument("-n", "--requests", type=int, default=100, help="how many streams (default: %(default)s)")
    parser.add_argument("-s", "--seed", type=int, help="repeats a run's requests and deaths (default: a new one)")
    parser.add_argument("--dir", type=Path, help="where to make the run's directory (default: the temporary one)")
    parser.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    options = parser.parse_args()
    if options.requests < 1:
        parser.error("--requests must be above 0")
    return options


if __name__ == "__main__":
    sys.exit(main())
