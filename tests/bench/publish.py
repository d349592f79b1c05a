"""`python -m tests.bench.publish`: run the benchmarks of docs/benchmarks.md, keep their figures, and write the page.

Each prints one JSON value, which is kept in docs/benchmarks/NAME.json, with the commit, the machine and the load. The
page is written at the end, or when it is interrupted, from what is there: one that was not run is said to be so. A
benchmark that fails leaves its last figures as they are, and the others run; exit code 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.bench import page, plots, result
from tests.bench.result import ROOT, Result
from tests.bench.sections import SECTIONS, Section

INTERRUPTED = 130
END_S = 90.0
"""How long a benchmark may take to end what it has started."""


class Given(NamedTuple):
    """Arguments of a command: as they are, and as the page shows them, without this machine's paths."""

    arguments: list[str]
    shown: list[str]


def given(options: argparse.Namespace) -> dict[str, Given]:
    """By what they are. Raises OSError or subprocess.CalledProcessError for a tree that is none."""
    found = {}
    if options.traces:
        pairs = [trace.partition("=")[::2] for trace in options.traces]
        found["traces"] = Given(options.traces, [f"{name}={Path(path).name}" for name, path in pairs])
    if options.against:
        tree = options.against.resolve()
        found["against"] = Given(["--against", str(tree)], ["--against", result.head(tree)])
    return found


def run(section: Section, more: Given) -> Result | None:
    """One benchmark, bounded; None: it failed, and has said why."""
    (commit, changed), load, began = result.commit(), os.getloadavg()[0], time.monotonic()
    try:
        command = [sys.executable, "-m", *shlex.split(section.command), *more.arguments]
        figures = _printed(command, section.most_s)
        msgspec.json.decode(figures, type=section.figures)
    except (subprocess.SubprocessError, msgspec.MsgspecError) as exc:
        print(f"{section.name}: failed: {str(exc)[:300]}", file=sys.stderr)
        return None
    return Result(
        benchmark=section.name,
        command=shlex.join([*shlex.split(section.shown), *more.shown]),
        commit=commit,
        changed=changed,
        date=result.now(),
        took_s=round(time.monotonic() - began, 1),
        load_before=round(load, 2),
        load_after=round(os.getloadavg()[0], 2),
        machine=result.machine(),
        figures=msgspec.Raw(figures),
    )


def _printed(command: list[str], most_s: float) -> bytes:
    """What a command prints. It ends what it has started, also where it is interrupted or takes too long.

    Raises subprocess.TimeoutExpired, and subprocess.CalledProcessError for one that fails.
    """
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            printed, _ = process.communicate(timeout=most_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as exc:
            # Ctrl-C has reached it too, and a second one would keep it from tidying up.
            if isinstance(exc, subprocess.TimeoutExpired):
                process.send_signal(signal.SIGINT)
            _end(process)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return printed.strip()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def write(directory: Path, text: Path) -> None:
    """The page and its plots, from the figures that are there."""
    runs = page.load(directory)
    plots.write(runs, directory)
    text.write_text(page.render(runs), "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.publish",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--traces", nargs="+", default=[], metavar="NAME=FILE", help="to replay; else nothing is")
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="another working tree, whose `pdq up` is measured too"
    )
    parser.add_argument("--more", type=shlex.split, default=[], metavar="'OPTIONS'", help="of the one benchmark named")
    parser.add_argument("--page", action="store_true", help="run nothing: only write the page")
    options = parser.parse_args(arguments)
    if options.more and len(options.only) != 1:
        parser.error("--more is for one benchmark: --only NAME")
    failed: list[str] = []
    try:
        if not options.page:
            _run_all([SECTIONS[name].asked(options.more) for name in options.only], given(options), failed)
    except KeyboardInterrupt:
        print("interrupted: what was done is kept", file=sys.stderr)
        return INTERRUPTED
    finally:
        write(result.DIRECTORY, page.PAGE)
    print(f"{page.PAGE}{f'; failed: {chr(32).join(failed)}' if failed else ''}", file=sys.stderr)
    return 1 if failed else 0


def _run_all(sections: Sequence[Section], more: Mapping[str, Given], failed: list[str]) -> None:
    """Each that ends well is kept at once; the names of the others are added to `failed`."""
    for section in sections:
        if section.needs_it and section.takes not in more:
            print(f"{section.name}: left out: it needs --{section.takes}", file=sys.stderr)
            continue
        print(f"{section.name}: {section.shown}", file=sys.stderr)
        found = run(section, more.get(section.takes, Given([], [])))
        if found is None:
            failed.append(section.name)
        else:
            print(f"{section.name}: {found.took_s:.0f} s, {result.save(found, result.DIRECTORY)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
