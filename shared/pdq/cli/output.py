"""What the command writes: answers to stdout, byte for byte; everything else to stderr.

A closed pipe is no error of ours: the command ends quietly. A full disk is, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from pdq.errors import PdqError
from pdq.messages import KvReport


class OutputClosed(Exception):
    """Nobody reads stdout any more."""


class OutputFailed(PdqError):
    """stdout cannot be written."""

    code = "output_failed"


def write(text: str) -> None:
    """Write to stdout, now. Raises OutputClosed or OutputFailed."""
    write_bytes(text.encode("utf-8", "replace"))


def write_bytes(data: bytes) -> None:
    """As `write`."""
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as exc:
        abandon_stdout()
        if exc.errno in (errno.EPIPE, errno.ESHUTDOWN):
            raise OutputClosed from exc
        raise OutputFailed(f"cannot write to stdout: {exc.strerror}") from exc


def line(text: str = "") -> None:
    write(f"{text}\n")


def json(value: Any) -> None:
    """One JSON object on a line of its own."""
    line(msgspec.json.encode(value).decode())


def note(text: str) -> None:
    """A line for people, on stderr. A closed stderr is not worth an error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def error(code: str, message: str, param: str | None = None) -> None:
    """`pdq: <code>: <message>`, on one line; an error with a story (the end of a log) has it below."""
    first, _, story = message.partition("\n")
    named = f" ({param})" if param and param not in first else ""
    note(f"pdq: {code}: {_one_line(first)}{named}")
    if story:
        note(story)


def table(rows: Iterable[Sequence[object]]) -> str:
    """Rows of equal length as aligned text; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(text) for text, _ in column) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            text.rjust(width) if right else text.ljust(width) for (text, right), width in zip(row, widths, strict=True)
        )
        for row in cells
    )
    return "\n".join(map(str.rstrip, lines))


def kv(report: KvReport) -> str:
    """A KV report for people."""
    had = f", {report.local_tokens} still there" if report.local_tokens else ""
    why = f", refused: {report.cause}" if report.cause else ""
    return f"{report.loaded_tokens} of {report.promised_tokens} promised tokens loaded{had}{why}"


def _cell(value: object) -> tuple[str, bool]:
    """Its text, and whether it stands to the right."""
    if isinstance(value, float):
        return f"{value:,.1f}", True
    return str(value), isinstance(value, int)


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()


def abandon_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's own flush at exit does not fail too."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
