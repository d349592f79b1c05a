"""`python -m tests.matrix`: every KV mode in every order, and every fault. Exit codes: 0 all well, 1 something is not.

Needs the engine set, what infra/locks/verify.lock brings, and 8 GB of memory; about half an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import logging
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from tests.e2e.conftest import default_model
from tests.matrix.faults import FAULTS
from tests.matrix.report import Report, markdown
from tests.matrix.rig import MODES
from tests.matrix.run import QUESTIONS, run


def main() -> int:
    options = _options()
    directory = Path(tempfile.mkdtemp(prefix="pdq-matrix-", dir=options.dir))
    logging.getLogger("pdq").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report(commit=_commit(), date=datetime.date.today().isoformat())
    began = time.monotonic()
    faults = [fault for fault in FAULTS if options.faults in f"{fault.name}, {fault.when}"]
    try:
        asyncio.run(run(report, directory, default_model(), options.modes, options.prompts, faults))
    finally:
        report.seconds = time.monotonic() - began
        (directory / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        print(markdown(report))
        print(f"report.json and logs are in {directory}", file=sys.stderr)
    return 1 if report.wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("modes", nargs="*", help=f"default: {' '.join(MODES)}")
    parser.add_argument("-n", "--prompts", type=int, default=QUESTIONS, help="default: %(default)s")
    parser.add_argument("--faults", default="", metavar="TEXT", help="only those whose name holds this; `-`: none")
    parser.add_argument("--dir", type=Path, help="where to make the run's directory (default: the temporary one)")
    options = parser.parse_args()
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"there is no mode {', '.join(sorted(unknown))}")
    options.modes = options.modes or list(MODES)
    return options


def _commit() -> str:
    line = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
