"""Ends what a supervisor leaves behind when it dies without a chance to: a program of its own.

It reads from its parent, line by line: `group N` (a process group to end), `ended N` (one that is gone), `file
PATH` (a file to delete at the end). When the parent is gone, however it died, the reading ends; then every
group gets SIGTERM and, after a while, SIGKILL. A group holds a process's own children too, which no parent's
death signal would reach. Standard library only, so that it is small and starts at once.

Usage: guard.py SECONDS
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

POLL_S = 0.1


def main(patience_s: float) -> None:
    groups: dict[int, None] = {}
    files: list[str] = []
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups[int(rest)] = None
        elif word == "ended":
            groups.pop(int(rest), None)
        else:
            files.append(rest)
    end(list(groups), patience_s)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


def end(groups: list[int], patience_s: float) -> None:
    give_up = time.monotonic() + patience_s
    for number, until in ((signal.SIGTERM, give_up), (signal.SIGKILL, give_up + patience_s)):
        groups = [group for group in groups if send(group, number)]
        while groups and time.monotonic() < until:
            time.sleep(POLL_S)
            groups = [group for group in groups if send(group, 0)]


def send(group: int, number: int) -> bool:
    """Signal a group; whether there is anyone in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]))
