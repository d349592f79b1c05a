"""What `pdq trace` does: find a request's spans in the local stack's files or in a Jaeger, and show them."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

from pdq import settings, traces
from pdq.cli import connect, output
from pdq.cli.prompt import check_request
from pdq.client import Client
from pdq.errors import Rejected
from pdq.jaeger import Jaeger
from pdq.traces import Trace
from pdq.up.layout import Layout

Find = Callable[[], Awaitable[Trace | None]]

FILES_WAIT_S = 2.0
"""Spans reach the files within a tenth of a second of their end."""
JAEGER_WAIT_S = 8.0
"""Services export every five seconds, and a collector may hold spans back for one more."""
POLL_S = 0.25
LAST_STAGE = "process decode"


async def show(request: str, as_json: bool, jaeger: str = "", nats_url: str = "") -> None:
    """Print the trace of a request, or of a trace id. Raises Rejected when there is none.

    jaeger: ask this Jaeger and nothing else. Without it the files are looked through first, then the Jaeger that
    is configured, if any. nats_url: the broker that knows the request's trace.
    """
    trace = await _asked(request, jaeger, nats_url) if jaeger else await found(request, nats_url)
    if as_json:
        output.json(traces.to_json(trace))
    else:
        output.write(rendered(trace))


async def found(request: str, nats_url: str) -> Trace:
    """From the files, else from the Jaeger that is configured. Raises Rejected when there is none."""
    directory = Layout.of(settings.home(os.environ)).traces
    jaeger = settings.jaeger_url(os.environ)
    if jaeger and in_files(directory, request) is None:
        return await _asked(request, jaeger, nats_url)

    async def find() -> Trace | None:
        return in_files(directory, request)

    trace = await settled(find, FILES_WAIT_S)
    if trace is None:
        raise Rejected(f"no trace of {request} in {directory}", code="not_found", param="id")
    return trace


async def _asked(request: str, url: str, nats_url: str) -> Trace:
    jaeger = Jaeger(url)
    trace_id = request if traces.is_trace_id(request) else await _trace_id(request, nats_url)
    trace = await settled(lambda: jaeger.trace(trace_id), JAEGER_WAIT_S)
    if trace is None:
        raise Rejected(f"{jaeger.place} has no trace {trace_id}", code="not_found", param="id")
    return trace


async def _trace_id(request: str, nats_url: str) -> str:
    """As the request's log has it. Raises Rejected where there is none, or Unavailable."""
    where = connect.target(nats_url)
    async with connect.bus(where) as bus:
        state = await Client(bus, settings.tenant(where.environ)).state(check_request(request, reserved=True))
    if state is None:
        raise Rejected(f"no request {request}", code="not_found", param="id")
    if not state.trace:
        raise Rejected(f"request {request} was not traced", code="not_found", param="id")
    return state.trace


def in_files(directory: Path, request: str) -> Trace | None:
    # A request that was submitted again under its name has more traces: short ones, as it is not run twice.
    return max(traces.find(directory, request), key=lambda found: len(found.spans), default=None)


async def settled(find: Find, wait_s: float) -> Trace | None:
    """The trace once its last stage is there and no more spans come; after `wait_s` whatever there is."""
    give_up = time.monotonic() + wait_s
    before = 0
    while True:
        trace = await find()
        spans = len(trace.spans) if trace is not None else 0
        if (trace is not None and whole(trace) and spans == before) or time.monotonic() > give_up:
            return trace
        before = spans
        await asyncio.sleep(POLL_S)


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
