"""docs/benchmarks.md, from templates (tests/bench/templates) and the figures that benchmarks have left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pdq.bench import metrics

from tests.bench import claims, result
from tests.bench.result import DIRECTORY, ROOT, Machine, Result
from tests.bench.sections import SECTIONS
from tests.bench.stats import Spread, percentile, spread

PAGE = ROOT / "docs" / "benchmarks.md"
TEMPLATES = Path(__file__).parent / "templates"


class Run(NamedTuple):
    """A benchmark that was run: how, and its figures, of the type that its section says."""

    result: Result
    figures: Any


Runs = Mapping[str, Run | str]
"""By benchmark; a text: why there are no figures."""


def load(directory: Path = DIRECTORY) -> dict[str, Run | str]:
    """What each benchmark has left in a directory, or why there is nothing."""
    return {name: _load(name, directory) for name in SECTIONS}


def _load(name: str, directory: Path) -> Run | str:
    try:
        found = result.load(name, directory)
        if found is None:
            return "It was not run"
        return Run(found, msgspec.json.decode(found.figures, type=SECTIONS[name].figures))
    except msgspec.MsgspecError:
        return "What was kept of its last run is of another version of it"


def render(runs: Runs) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters.update(figure=figure, told=told, percent=percent, two=two)
    environment.globals.update(spread=spread, percentile=percentile)

    def section(name: str) -> str:
        run = runs[name]
        known: dict[str, Any] = {"section": SECTIONS[name], "run": None, "missing": run}
        if isinstance(run, Run):
            known |= {"run": run.result, "f": run.figures, "missing": ""}
        return environment.get_template(f"{name}.md.j2").render(known)

    figures = {name: run.figures for name, run in runs.items() if isinstance(run, Run)}
    page = environment.get_template("page.md.j2")
    return page.render(
        sections=SECTIONS.values(),
        section=section,
        found=figures,
        claims=claims.claims(figures),
        machines=_machines(run.result.machine for run in runs.values() if isinstance(run, Run)),
    )


def _machines(found: Iterable[Machine]) -> list[Machine]:
    """Each once."""
    return list({msgspec.json.encode(machine): machine for machine in found}.values())


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def told(value: Spread | None) -> str:
    """A median, with the least and the most."""
    return "-" if value is None else f"{figure(value.median)} ({figure(value.min)} … {figure(value.max)})"


def two(found: metrics.Spread) -> str:
    """The median and the 99th percentile."""
    return f"{figure(found.p50)} / {figure(found.p99)}" if found.count else "-"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
