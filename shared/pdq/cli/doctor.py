"""`pdq doctor`: what does not fit together on this machine and around this broker, and what cures it."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from pdq.cli import exits, output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

if TYPE_CHECKING:
    from pdq.doctor import Finding, Report, Subject

COLORS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}
WIDTH = 120
CHECK_WIDTH = 24

Monitor = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="The broker's monitoring port (http://host:8222), which tells how it syncs and how full its store is.",
        show_default=False,
    ),
]


def doctor(as_json: AsJson = False, nats_url: NatsUrl = "", monitor: Monitor = "") -> None:
    """Examine what must fit together: KV contracts of the live workers, versions, broker, streams, LMCache, clocks,
    link, keys, models, settings, this machine. Each finding that is not `ok` names the trap and its cure.

    It changes nothing and takes a few seconds. Without a stack or a broker it examines this machine. docs/doctor.md
    lists every check. It ends with 0 when nothing failed, with 8 when something did.

    \b
    Examples:
      pdq doctor
      pdq doctor --nats-url nats://hub:4222 --monitor http://hub:8222
      pdq doctor --json | jq '.findings[] | select(.severity != "ok")'
    """
    with reported(as_json):
        from pdq.doctor import examine

        subject = _subject(nats_url, os.environ, monitor)
        report = run(partial(examine, subject))
        if as_json:
            output.json(report.plain())
        else:
            colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            output.line("\n".join(_lines(report, colored)))
        if report.failed:
            raise typer.Exit(exits.UNHEALTHY)


def _subject(nats_url: str, environ: Mapping[str, str], monitor: str) -> Subject:
    """What a command would speak to. A setting that stops every other command is a finding of this one."""
    from pdq import settings
    from pdq.cli import connect
    from pdq.doctor import Subject
    from pdq.errors import Misconfigured
    from pdq.up import record as records
    from pdq.up.layout import Layout
    from pdq.up.model import default_models_file

    unknown = settings.unknown_variables(environ)
    known = {name: value for name, value in environ.items() if name not in unknown}
    layout = Layout.of(settings.home(known))
    models = default_models_file(settings.models_path(known))
    alone = Subject(environ=environ, layout=layout, models_path=models, monitor=monitor)
    try:
        where = connect.target(nats_url, known)
    except connect.NotRunning as exc:
        stack = records.running(layout)
        return replace(alone, stack=stack, why=str(exc), named=stack is not None)
    except Misconfigured as exc:
        return replace(alone, why=str(exc), named=True)
    return replace(
        alone,
        place=where.place,
        stack=where.stack,
        models_path=layout.models if where.stack else models,
        connect=partial(connect.bus, where),
        named=True,
    )


def _lines(report: Report, colored: bool) -> Iterator[str]:
    """A line per finding; trap and cure below those that have one."""
    for finding in report.findings:
        yield from _finding(finding, colored)
    counts = report.plain()["counts"]
    yield f"\n{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures in {report.took_s:.1f} s"


def _finding(finding: Finding, colored: bool) -> Iterator[str]:
    severity = finding.severity.ljust(4)
    severity = typer.style(severity, fg=COLORS[finding.severity], bold=True) if colored else severity
    about = f"{finding.subject}: " if finding.subject and finding.subject not in finding.found else ""
    first, *more = _wrapped(about + finding.found)
    yield f"{severity}  {finding.check.ljust(CHECK_WIDTH)} {first}"
    indent = " " * (CHECK_WIDTH + 7)
    yield from (indent + line for line in more)
    for label, text in (("trap", finding.trap), ("cure", finding.cure)):
        lines = _wrapped(f"{label}: {text}") if text else []
        yield from (indent + ("" if number == 0 else " " * 6) + line for number, line in enumerate(lines))


def _wrapped(text: str) -> list[str]:
    # Commands and addresses are copied from here: they are never broken.
    return textwrap.wrap(text, WIDTH - CHECK_WIDTH - 13, break_long_words=False, break_on_hyphens=False) or [""]
