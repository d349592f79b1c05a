"""`pdq worker`: a worker of this machine, in the foreground."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from pdq.cli.running import reported

MODULES = {"prefill": "pdq_prefill", "decode": "pdq_decode", "both": "pdq_worker"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def worker(
    role: Annotated[
        Literal["prefill", "decode", "both"], typer.Option(help="The stage it serves; both: on one engine.")
    ],
    model: Annotated[
        str, typer.Option(metavar="SLUG", help="A table of models.toml; default: $PDQ_WORKER_MODEL, else its only one.")
    ] = "",
    idle_exit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="End, with code 0, when it held no job for so long; 0: never."),
    ] = None,
    env_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines NAME=VALUE; what the environment has comes first.")
    ] = None,
) -> None:
    """Run a worker, until it is told to stop or has nothing to do.

    It dials out to the broker and to its LMCache server, and needs no open port. SIGTERM and Ctrl-C let what runs
    finish within PDQ_WORKER_DRAIN_S and give back the rest; a second signal does not wait.

    \b
    Examples:
      pdq worker --role decode --env-file worker.env
      pdq worker --role both --idle-exit 300 --env-file worker.env

    This command becomes the service: `python -m pdq_decode` and the like. Its exit codes: 0 stopped as asked, or idle;
    1 failed; 2 it cannot start like this. The last line of its log says why.
    """
    with reported():
        from pdq import settings

        environ = dict(os.environ)
        if env_file is not None:
            environ = read(env_file) | environ
        if model:
            environ["PDQ_WORKER_MODEL"] = model
        if idle_exit is not None:
            environ["PDQ_WORKER_IDLE_EXIT_S"] = f"{idle_exit:g}"
        # It keeps Python from caching bytecode, and doubles the next start.
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        settings.check_environment(environ)
        # Without the working directory on its path, as this command is.
        os.execve(sys.executable, [sys.executable, "-P", "-m", MODULES[role]], environ)


def read(path: Path) -> dict[str, str]:
    """An environment file: lines `NAME=VALUE`, blank lines and `#` comments. One pair of quotes around a value is
    taken off. Raises Misconfigured."""
    from pdq.errors import Misconfigured

    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, _text(path).splitlines()), 1):
        if line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            if not equals or not NAME.match(name):
                # Not the line itself: it may hold a secret.
                raise Misconfigured(f"{path}, line {number}: expected NAME=VALUE")
            found[name] = _unquoted(value.strip())
    return found


def _text(path: Path) -> str:
    from pdq.errors import Misconfigured

    try:
        # Some editors begin a file with a byte order mark.
        text = path.read_text("utf-8-sig")
    except OSError as exc:
        raise Misconfigured(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise Misconfigured(f"{path} is not a text file") from exc
    if "\0" in text:
        raise Misconfigured(f"{path} is not a text file")
    return text


def _unquoted(value: str) -> str:
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value
