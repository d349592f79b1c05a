"""Which series and labels a PromQL expression reads: enough of its grammar for dashboards and alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DASHBOARDS = ROOT / "infra/grafana/dashboards"
RULES = ROOT / "infra/prometheus/rules.yml"

WORDS = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})
GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})

_TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<range>\[[^\]]*\])
    | (?P<number>(?<![\w:])\d[\w.]*)
    | (?P<variable>\$\w+|\$\{\w+\})
    | (?P<name>[a-zA-Z_:][\w:]*)
    | (?P<sign>[{}(),])
    """,
    re.VERBOSE,
)


class Query(NamedTuple):
    """One expression, and where it stands: `file: panel or alert`."""

    where: str
    expr: str


class Used(NamedTuple):
    """What an expression reads: labels chosen on each series, and labels that it groups by."""

    series: dict[str, set[str]]
    grouped: set[str]


def used(expr: str) -> Used:
    found = Used({}, set())
    tokens = [(match.lastgroup, match.group()) for match in _TOKEN.finditer(expr)]
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        place += 1
        if kind != "name" or text in WORDS:
            continue
        if text in GROUPING:
            end = _end(tokens, place, ")") if following == "(" else place
            found.grouped.update(_names(tokens, place, end))
            place = end
        elif following == "{":
            end = _end(tokens, place, "}")
            found.series.setdefault(text, set()).update(_names(tokens, place, end))
            place = end
        elif following not in {"(", "by", "without"}:
            found.series.setdefault(text, set())
    return found


def _end(tokens: list[tuple[str | None, str]], begin: int, sign: str) -> int:
    return next(place for place in range(begin, len(tokens)) if tokens[place][1] == sign) + 1


def _names(tokens: list[tuple[str | None, str]], begin: int, end: int) -> set[str]:
    return {text for kind, text in tokens[begin:end] if kind == "name"}


def dashboards() -> dict[str, dict[str, Any]]:
    """By file name."""
    return {path.name: json.loads(path.read_text("utf-8")) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels but the headings of rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


def queries(name: str) -> list[Query]:
    """Those of one dashboard."""
    return [
        Query(f"{name}: {panel['title']}", target["expr"])
        for panel in panels(dashboards()[name])
        for target in panel.get("targets", [])
    ]


def alerts() -> list[dict[str, Any]]:
    import yaml

    document = yaml.safe_load(RULES.read_text("utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def alert_queries() -> list[Query]:
    return [Query(f"rules: {rule['alert']}", rule["expr"]) for rule in alerts()]


def missing(queries: list[Query], live: dict[str, set[str]], prefix: str) -> list[str]:
    """What the queries name and `live` (series and their labels) does not have, as lines for people.

    Only series that begin with `prefix` are looked for; labels are looked for on those.
    """
    # What Prometheus itself adds to a scraped series.
    added = {"instance", "job", "service"}
    lines = []
    for query in queries:
        reads = used(query.expr)
        for name, labels in reads.series.items():
            if not name.startswith(prefix):
                continue
            if name not in live:
                lines.append(f"{query.where}: no series {name}")
            elif unknown := labels - live[name] - added:
                lines.append(f"{query.where}: {name} has no label {', '.join(sorted(unknown))}")
        known = added.union(*(live.get(name, set()) for name in reads.series))
        if all(name.startswith(prefix) for name in reads.series) and (unknown := reads.grouped - known):
            lines.append(f"{query.where}: grouped by {', '.join(sorted(unknown))}, which none of its series has")
    return lines


def exposed(text: str) -> dict[str, set[str]]:
    """The series of a /metrics text, each with its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
