"""What `pdq batch` does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pdq import settings
from pdq.batch.asking import Asker, Options
from pdq.batch.results import Results, in_file
from pdq.batch.run import Batch, batch_of, examine
from pdq.cli import connect, exits, output
from pdq.cli.batch_progress import told
from pdq.cli.connect import Target
from pdq.cli.running import Stopped, run
from pdq.client import Client
from pdq.errors import Rejected
from pdq.messages import PurgeReply
from pdq.settings import Models

PIPE = Path("-")
PURGE_TIMEOUT_S = 10.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, as the command line describes it."""

    file: Path
    to: Path
    model: str
    priority: str
    concurrency: int
    timeout_s: float
    name: str
    purge_on_interrupt: bool


class Summary(msgspec.Struct):
    """Numbers of lines that are not blank. `earlier`: with results of an earlier run, among those that succeeded or
    failed. `open`: without a result."""

    lines: int = 0
    succeeded: int = 0
    failed: int = 0
    earlier: int = 0
    open: int = 0

    def text(self) -> str:
        parts = [f"{self.lines} lines: {self.succeeded} succeeded", f"{self.failed} failed"]
        if self.open:
            parts.append(f"{self.open} open")
        return ", ".join(parts) + (f" ({self.earlier} by an earlier run)" if self.earlier else "")


def check(wanted: Wanted, as_json: bool) -> None:
    """Raise Rejected for options that do not go together."""
    if as_json and wanted.to == PIPE:
        raise Rejected("results and the summary of --json cannot both go to stdout", code="usage", param="output")
    files = (wanted.file, wanted.to)
    if PIPE not in files and all(file.exists() for file in files) and wanted.to.samefile(wanted.file):
        raise Rejected(f"{wanted.to} is both input and output", code="usage", param="output")


def run_batch(where: Target, wanted: Wanted, as_json: bool) -> int:
    """Run it, say what became of it, and return the exit code. Raises PdqError, OSError and OutputClosed."""
    summary, code = Summary(), exits.OK
    batch = _Run(where, wanted, summary, as_json)
    try:
        run(batch.work)
        code = exits.FAILED if summary.failed else exits.OK
    except Stopped as exc:
        code = 128 + exc.number
        output.note(_how_to_go_on(wanted, batch.num_left))
    if as_json:
        output.json(msgspec.to_builtins(summary))
    output.note(summary.text() if summary.lines or code else "there are no lines to send")
    return code


def _how_to_go_on(wanted: Wanted, num_left: int) -> str:
    if wanted.file == PIPE and not wanted.name:
        return "stopped; what comes from stdin can only be gone on with under a --name"
    left = "what ran was purged" if wanted.purge_on_interrupt else "what was submitted goes on"
    if num_left:
        left = f"nobody answered for {num_left} of what ran: they go on"
    return f"stopped; {left}. Run the same command again to go on"


class _Run:
    """One run of a batch. What becomes of its lines goes into `summary`, whatever ends it."""

    def __init__(self, where: Target, wanted: Wanted, summary: Summary, as_json: bool) -> None:
        self._where = where
        self._wanted = wanted
        self._summary = summary
        self._as_json = as_json
        self.num_left = 0
        """Requests that were to be purged, and may go on."""

    async def work(self) -> None:
        wanted, models = self._wanted, self._where.models()
        with _opened(wanted.file) as fd:
            name = wanted.name
            if stat.S_ISREG(os.fstat(fd).st_mode):
                found = await examine(fd)
                name, self._summary.lines = name or found.digest, found.num_lines
            model = _default_model(models, wanted.model)
            batch = batch_of(name or secrets.token_hex(), model)
            options = Options(batch, wanted.priority, wanted.timeout_s, known=wanted.to == PIPE or wanted.to.exists())
            with _results(wanted.to, batch) as results:
                self._summary.earlier = results.num_succeeded + results.num_failed
                await self._send(fd, options, results, models, model)

    async def _send(self, fd: int, options: Options, results: Results, models: Models | None, model: str) -> None:
        with told(self._summary.lines, self._summary.earlier, bar=not self._as_json) as shown:
            async with connect.bus(self._where) as bus:
                client = Client(bus, settings.tenant(self._where.environ))
                asker = Asker(client, models, options)
                batch = Batch(options.batch, asker, results, models, model, self._wanted.concurrency, shown.result)
                try:
                    await batch.run(fd)
                except (asyncio.CancelledError, output.OutputClosed):
                    if self._wanted.purge_on_interrupt:
                        self.num_left = await _purge(client, list(asker.running.values()))
                    raise
                finally:
                    self._count(results, batch.num_lines)

    def _count(self, results: Results, num_read: int) -> None:
        summary = self._summary
        summary.lines = max(summary.lines, num_read)
        summary.succeeded, summary.failed = results.num_succeeded, results.num_failed
        summary.open = max(0, summary.lines - summary.succeeded - summary.failed)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    if file == PIPE:
        if sys.stdin is None:
            raise Rejected("stdin is closed", code="usage", param="FILE")
        yield sys.stdin.fileno()
        return
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as exc:
        raise Rejected(f"cannot read {file}: {exc.strerror}", code="usage", param="FILE") from exc
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _results(to: Path, batch: str) -> Iterator[Results]:
    if to == PIPE:
        yield Results(output.write_bytes)
        return
    with in_file(to, batch) as results:
        yield results


def _default_model(models: Models | None, wanted: str) -> str:
    """The model of lines that name none; empty: they must, because several are served."""
    if wanted or models is None:
        return wanted
    return next(iter(models.by_slug)) if len(models.by_slug) == 1 else ""


async def _purge(client: Client, requests: list[str]) -> int:
    """Purged, not cancelled: under their names a later run sends them anew. Returns how many may go on all the same."""
    purging = [asyncio.create_task(client.purge(request)) for request in requests]
    if purging:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(purging, timeout=PURGE_TIMEOUT_S)
    for task in purging:
        task.cancel()
    await asyncio.gather(*purging, return_exceptions=True)
    return sum(not _is_gone(task) for task in purging)


def _is_gone(purging: asyncio.Task[PurgeReply]) -> bool:
    if purging.cancelled() or purging.exception() is not None:
        return False
    error = purging.result().error
    return error is None or error.code == "not_found"
