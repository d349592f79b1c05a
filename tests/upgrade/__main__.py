"""`python -m tests.upgrade`: see docs/upgrades.md. Exit codes: 0 no request failed; 1 some did."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.plan import ORDERS
from tests.upgrade.run import between, run, upgrades

MOST_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument("--old", type=Path, help="upgrade from the release in this working tree, and back")
    parser.add_argument(
        "--orders", nargs="+", default=ORDERS, help="what requests ask for: an old release may lack some"
    )
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="pdq-upgrade-"))
    wrong = 0
    planned = between(options.old) if options.old else upgrades(directory)
    for number, (name, (first, rolls)) in enumerate(planned.items()):
        place = directory / str(number)
        place.mkdir()
        report = asyncio.run(run(name, place, first, rolls, _tell, options.orders))
        print("\n".join((report.line, *(f"  {line}" for line in report.violations[:MOST_SHOWN]))), flush=True)
        wrong += len(report.violations)
    if wrong:
        print(f"logs are in {directory}", file=sys.stderr)
    else:
        shutil.rmtree(directory)
    return 1 if wrong else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
