"""How a command runs: its errors become one line and an exit code, its signals cancel what it awaits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import typer

from pdq.cli import exits, output
from pdq.errors import PdqError

T = TypeVar("T")


class Stopped(Exception):
    """A signal ended the command. `number`: which one."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class SystemFailed(PdqError):
    """The operating system refuses something: a directory that cannot be written, a full disk."""

    code = "os_error"

    def __init__(self, exc: OSError) -> None:
        super().__init__(f"{exc.strerror or exc}" + (f": {exc.filename}" if exc.filename else ""))


@contextlib.contextmanager
def reported(as_json: bool = False) -> Iterator[None]:
    """Report what a command ends with. With `as_json` an error is an object on stdout as well."""
    try:
        yield
    except PdqError as exc:
        raise typer.Exit(_report(exc, as_json)) from None
    except OSError as exc:
        raise typer.Exit(_report(SystemFailed(exc), as_json)) from None
    except output.OutputClosed:
        raise typer.Exit(exits.CLOSED_PIPE) from None
    except Stopped as exc:
        raise typer.Exit(128 + exc.number) from None
    except KeyboardInterrupt:
        raise typer.Exit(exits.INTERRUPTED) from None


def _report(exc: PdqError, as_json: bool) -> int:
    param = getattr(exc, "param", None)
    output.error(exc.code, str(exc), param)
    if as_json and not isinstance(exc, output.OutputFailed):
        with contextlib.suppress(output.OutputClosed, output.OutputFailed):
            output.json({"error": {"code": exc.code, "message": str(exc), "param": param}})
    return exits.of(exc)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end. SIGINT and SIGTERM cancel it, a second one cancels what it does about the first.

    Raises Stopped.
    """
    got: list[int] = []

    async def main() -> T:
        task = asyncio.ensure_future(work())

        def stop(number: int) -> None:
            got.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise Stopped(got[0] if got else signal.SIGINT) from None
