"""docs/operations.md and docs/backup.md: a section for each alarm, figures that are the code's, anchors that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pdq import settings, subjects

from tests import promql
from tests.promql import used

DOCS = promql.ROOT / "docs"
GUIDE = (DOCS / "operations.md").read_text("utf-8")
PARTS = ("- **Lost**: ", "- **Look**: ", "- **Do**: ")
PAGES = ("operations.md", "backup.md")


def anchor(heading: str) -> str:
    """Of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def sections() -> dict[str, str]:
    """What the guide says of each alarm."""
    return dict(re.findall(r"^### (Pdq\w+)\n(.*?)(?=^##)", GUIDE, re.MULTILINE | re.DOTALL))


def alert_tests() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load((promql.RULES.parent / "tests.yml").read_text("utf-8"))["tests"]
    return tests


def fired() -> set[str]:
    """Alerts that some test of tests.yml expects to fire."""
    found: set[str] = set()
    for test in alert_tests():
        samples = [each for one in test.get("promql_expr_test", ()) for each in one["exp_samples"]]
        found.update(*(re.findall(r'alertname="(\w+)"', sample["labels"]) for sample in samples))
        found.update(one["alertname"] for one in test.get("alert_rule_test", ()) if one["exp_alerts"])
    return found


def test_every_alarm_has_a_section_and_every_section_an_alarm() -> None:
    assert list(sections()) and set(sections()) == {rule["alert"] for rule in promql.alerts()}


@pytest.mark.parametrize("rule", promql.alerts(), ids=lambda rule: rule["alert"])
def test_an_alarm_points_to_its_section(rule: dict[str, Any]) -> None:
    page, _, place = rule["annotations"]["runbook"].partition("#")
    assert promql.ROOT / page == DOCS / "operations.md" and place in anchors(DOCS / "operations.md")
    assert place == rule["alert"].lower()


@pytest.mark.parametrize("alarm", sections())
def test_a_section_says_what_it_means_what_is_lost_where_to_look_and_what_to_do(alarm: str) -> None:
    text = sections()[alarm]
    assert all(text.count(part) == 1 for part in PARTS)
    assert len(text.strip().partition("\n\n")[0]) > 30, "what it means"


def test_alarms_stand_in_the_column_of_their_severity() -> None:
    rows = re.findall(r"^\|(.*\[Pdq.*)\|$", GUIDE, re.MULTILINE)
    pages = {name for row in rows for name in re.findall(r"\[(\w+)\]", row.split("|")[0])}
    told = {name for row in rows for name in re.findall(r"\[(\w+)\]", row)}
    assert told == set(sections())
    assert pages == {rule["alert"] for rule in promql.alerts() if rule["labels"]["severity"] == "page"}


@pytest.mark.parametrize("rule", promql.alerts(), ids=lambda rule: rule["alert"])
def test_an_alarm_is_seen_to_fire_and_to_be_silent(rule: dict[str, Any]) -> None:
    """By what tests.yml expects, which promtool runs: the healthy stack has every series that the alarm reads."""
    assert rule["alert"] in fired()
    (healthy,) = (test for test in alert_tests() if test["name"] == "a healthy stack raises nothing")
    assert all(
        one["expr"] == 'ALERTS{alertstate="firing"}' and not one["exp_samples"] for one in healthy["promql_expr_test"]
    )
    there = {one["series"].partition("{")[0] for one in healthy["input_series"]}
    assert set(used(rule["expr"]).series) <= there


def test_the_sizes_of_streams_are_those_of_the_code() -> None:
    made = {one["name"]: one for one in subjects.streams(settings.LimitSettings().of_streams())}
    rows = re.findall(r"^\| `(\w+)`(?:, `(\w+)`)? \|([^|]*)\|([^|]*)\|", GUIDE, re.MULTILINE)
    told = {name: size for *names, _, size in rows for name in names if name.startswith(("PDQ_", "KV_PDQ_"))}
    assert told.keys() == made.keys()
    units = {"GiB": 1 << 30, "MiB": 1 << 20}
    for name, size in told.items():
        number = re.search(r"(\d+) (GiB|MiB)", size)
        assert made[name].get("max_bytes") == (int(number[1]) * units[number[2]] if number else None), name
    total = sum(one.get("max_bytes") or 0 for one in made.values())
    assert f"{total / (1 << 30):g} GiB by default" in GUIDE


def test_the_backup_page_decides_on_every_stream() -> None:
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+)(?:, at a site)? \| (yes|no)", (DOCS / "backup.md").read_text("utf-8"), re.MULTILINE
    )
    decided = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    streams = subjects.streams(settings.LimitSettings().of_streams())
    assert decided == {one["name"] for one in streams} | {subjects.EDGE}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (DOCS / name).read_text("utf-8")):
        page, _, place = target.partition("#")
        file = (DOCS / page).resolve() if page else DOCS / name
        assert file.exists(), target
        assert not place or place in anchors(file), target
