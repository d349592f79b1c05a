"""How a stack that is starting or stopping is shown on stderr: live on a terminal, else a line per change."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from pdq.up.record import ProcessRecord, Record
from pdq.up.supervisor import Show

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


@contextlib.contextmanager
def shown(stream: TextIO = sys.stderr) -> Iterator[Show]:
    """What to call with every new record. The screen is left as it is then."""
    if not stream.isatty():
        yield Lines(stream).show
        return
    table = Table(stream)
    try:
        yield table.show
    finally:
        table.close()


class Lines:
    """One line for each change of a process, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._said: dict[str, str] = {}

    def show(self, record: Record) -> None:
        self._say("model", record.note)
        for process in record.processes:
            # Without the seconds, or each change elsewhere would repeat this line.
            quiet = process.state in ("waiting", "starting")
            self._say(process.name, process.state.replace("waiting", "") if quiet else describe(process))

    def _say(self, name: str, text: str) -> None:
        if text and self._said.get(name) != text:
            # A terminal that has gone is no reason to end the stack.
            with contextlib.suppress(OSError):
                print(f"{name}: {text}", file=self._stream, flush=True)
        self._said[name] = text


class Table:
    """A line for each process that stays in its place, while there is something to wait for."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream)
        self._live: Live | None = None
        self._record: Record | None = None

    def show(self, record: Record) -> None:
        self._record = record
        moving = record.state in ("starting", "stopping") or any(p.state == "restarting" for p in record.processes)
        if not moving:
            self.close()
        elif self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _render(self) -> RenderableType:
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid.grid(padding=(0, 2))
        record = self._record
        for process in record.processes if record else []:
            state = Text(describe(process), _STYLES.get(process.state, ""))
            grid.add_row(f"  {process.name}", state, *_where(process))
        if record is not None and record.note:
            grid.add_row("  model", record.note)
        return grid


_STYLES = {"ready": "green", "starting": "yellow", "restarting": "yellow", "failed": "red", "waiting": "dim"}


def describe(process: ProcessRecord) -> str:
    """The state in a few words."""
    if process.state == "ready":
        return f"ready after {process.took_s:g} s"
    if process.state == "restarting":
        return f"died; restart {process.restarts}"
    if process.state == "starting" and process.started:
        return f"starting, {max(0, int(time.time() - process.started))} s"
    return process.state


def _where(process: ProcessRecord) -> tuple[str, str]:
    ports = ", ".join(f"{name} {port}" for name, port in process.ports.items() if name != process.name)
    own = process.ports.get(process.name)
    listed = ", ".join(filter(None, (f":{own}" if own else "", ports)))
    return (f"pid {process.pid}" if process.pid else "", listed)
