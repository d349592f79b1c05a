"""What `pdq trace` does: find a request's spans in the local stack's files, and show them."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from pdq import settings, traces
from pdq.cli import output
from pdq.errors import Rejected
from pdq.traces import Trace
from pdq.up.layout import Layout

WAIT_S = 2.0
POLL_S = 0.25
LAST_STAGE = "process decode"
"""Spans reach the files within a tenth of a second of their end."""


def show(request: str, as_json: bool) -> None:
    """Print the trace of a request (or of a trace id). Raises Rejected when there is none."""
    directory = Layout.of(settings.home(os.environ)).traces
    trace = settled(directory, request)
    if trace is None:
        raise Rejected(f"no trace of {request} in {directory}", code="not_found", param="id")
    if as_json:
        output.json(traces.to_json(trace))
    else:
        output.write(rendered(trace))


def settled(directory: Path, request: str, wait_s: float = WAIT_S) -> Trace | None:
    """The trace once its last stage is there and no more spans come; after `wait_s` whatever there is."""
    give_up = time.monotonic() + wait_s
    before = 0
    while True:
        # A request that was submitted again under its name has more traces: short ones, as it is not run twice.
        trace = max(traces.find(directory, request), key=lambda found: len(found.spans), default=None)
        spans = len(trace.spans) if trace is not None else 0
        if (trace is not None and whole(trace) and spans == before) or time.monotonic() > give_up:
            return trace
        before = spans
        time.sleep(POLL_S)


def whole(trace: Trace) -> bool:
    """Whether no parent is missing, and the request has come to its end."""
    return len(trace.roots) == 1 and any(span.name == LAST_STAGE for span in trace.spans)


def rendered(trace: Trace) -> str:
    """The waterfall as text, for the terminal that stdout is, or for a file."""
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    width = shutil.get_terminal_size().columns
    traces.render(trace, Console(file=text, force_terminal=terminal, width=width))
    return text.getvalue()
