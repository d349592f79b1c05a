"""`python -m tests.scaling`: see docs/scaling.md. Exit codes: 0 all well, 1 something is wrong, 130 interrupted."""

from __future__ import annotations

import argparse
import asyncio
import logging
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec
from pdq.messages import AskedOrder

from tests.scaling.report import Report
from tests.scaling.run import Plan, run, stack_at

INTERRUPTED = 130


def main() -> int:
    options = _options()
    few = max(1, options.requests // 20)
    rest = options.requests - 1 - few
    plan = Plan(
        seed=options.seed,
        bursts=tuple(count for count in (1, rest // 2, few, rest - rest // 2) if count > 0),
        span_s=10.0,
        max_replicas=options.max_replicas,
        polling_s=1.0,
        cooldown_s=5.0,
        apart=options.apart,
        idle_exit_s=options.idle_exit,
    )
    directory = Path(tempfile.mkdtemp(prefix="pdq-scaling-"))
    print(f"bursts of {', '.join(map(str, plan.bursts))} requests, in {directory}", file=sys.stderr)
    logging.getLogger("pdq").setLevel(logging.ERROR)
    try:
        report = asyncio.run(_run(plan, directory, options.order))
    except KeyboardInterrupt:
        print(f"interrupted; logs are in {directory}", file=sys.stderr)
        return INTERRUPTED
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(report.lines()))
    if report.ok:
        shutil.rmtree(directory)
    else:
        print(f"logs are in {directory}", file=sys.stderr)
    return 0 if report.ok else 1


async def _run(plan: Plan, directory: Path, order: AskedOrder) -> Report:
    stack, monitoring = stack_at(directory, order)
    try:
        await stack.start()
        return await run(plan, stack, monitoring)
    finally:
        stack.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.scaling", description=__doc__)
    parser.add_argument("-n", "--requests", type=int, default=200, help="how many requests (default: %(default)s)")
    parser.add_argument("-s", "--seed", type=int, default=7, help="of prompts and lengths (default: %(default)s)")
    parser.add_argument("--max-replicas", type=int, default=3, help="of each role (default: %(default)s)")
    orders = ("prefill-first", "auto")
    parser.add_argument("--order", choices=orders, default=orders[0], help="the router's (default: %(default)s)")
    parser.add_argument("--apart", action="store_true", help="each role by its own jobs alone")
    parser.add_argument("--idle-exit", type=float, default=0.0, help="workers end by themselves when idle so long")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    options = parser.parse_args()
    if options.requests < 4:
        parser.error("--requests must be above 3")
    return options


if __name__ == "__main__":
    sys.exit(main())
