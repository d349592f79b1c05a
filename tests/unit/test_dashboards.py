"""Dashboards, alert rules and the files that bring them to Grafana and Prometheus: whole, and fit for each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests import promql
from tests.promql import Query, used

PROMETHEUS = promql.ROOT / "infra/prometheus"
GRAFANA = promql.ROOT / "infra/grafana"
NAMES = sorted(promql.dashboards())
WIDTH = 24
OF_MANY = frozenset({"cache_salt", "tenant", "request", "worker", "trace_id", "le"})
"""Labels not to be shown one by one: too many, or nobody's business. (`le` is for histogram_quantile alone.)"""


def dashboard(name: str) -> dict[str, Any]:
    return promql.dashboards()[name]


def document(path: str) -> Any:
    return yaml.safe_load((promql.ROOT / path).read_text("utf-8"))


def test_there_are_three_dashboards_with_ids_of_their_own() -> None:
    assert NAMES == ["lmcache.json", "nats.json", "pdq.json"]
    boards = promql.dashboards().values()
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 3
    assert all(board["description"] for board in boards)


@pytest.mark.parametrize("name", NAMES)
def test_panels_are_whole_and_do_not_lie_on_each_other(name: str) -> None:
    ids: list[int] = []
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(name)["panels"]:
        ids.append(panel["id"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    assert len(ids) == len(set(ids))
    for panel in promql.panels(dashboard(name)):
        assert panel["title"] and panel["targets"], panel["id"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", "the reader chooses it"
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)), panel["title"]
    assert [variable["name"] for variable in dashboard(name)["templating"]["list"]] == ["datasource"]


def test_the_first_dashboard_answers_what_it_is_for() -> None:
    asked = {
        "pdq_stage_duration_seconds_bucket",
        "pdq_queue_wait_seconds_bucket",
        "pdq_ttft_seconds_bucket",
        "pdq_tpot_seconds_bucket",
        "pdq_queue_depth",
        "pdq_queue_oldest_seconds",
        "pdq_stage_busy_slots",
        "pdq_kv_promised_tokens_total",
        "pdq_kv_loaded_tokens_total",
        "pdq_route_decisions_total",
        "pdq_dead_letters_total",
    }
    assert asked <= {name for query in promql.queries("pdq.json") for name in used(query.expr).series}
    stacked = [
        panel
        for panel in promql.panels(dashboard("pdq.json"))
        if panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        and "pdq_stage_duration_seconds_bucket" in str(panel["targets"])
    ]
    quantiles = [
        re.findall(r"histogram_quantile\(([\d.]+)", target["expr"]) for p in stacked for target in p["targets"]
    ]
    assert {quantile for each in quantiles for quantile in each} == {"0.5", "0.99"}


EVERY = [*promql.alert_queries(), *(query for name in NAMES for query in promql.queries(name))]


@pytest.mark.parametrize("query", EVERY, ids=lambda query: query.where)
def test_no_query_shows_a_label_of_many_values(query: Query) -> None:
    grouped = used(query.expr).grouped
    quantile = query.expr.startswith("histogram_quantile(")
    assert grouped & OF_MANY <= ({"le"} if quantile else set())
    assert ("le" in grouped) == quantile
    assert not re.search(r"\bwithout\b", query.expr), "it would keep whatever labels come later"


@pytest.mark.parametrize("query", EVERY, ids=lambda query: query.where)
def test_a_query_uses_each_series_as_what_it_is(query: Query) -> None:
    """Counters and histograms are read by rate or increase; what every router tells is never summed over routers."""
    for name in used(query.expr).series:
        if name.endswith(("_total", "_bucket")):
            uses = re.findall(rf"(\w+)\((?={name}\b)", query.expr)
            assert uses and set(uses) <= {"rate", "increase"}, query.expr
        elif name.startswith(("pdq_queue", "pdq_stage_", "pdq_stream", "pdq_workers", "pdq_broker")):
            assert re.search(r"\b(max|min|absent)\b", query.expr), query.expr


def test_series_and_labels_are_told_apart_in_a_query() -> None:
    expr = 'sum by (stage, le) (rate(a_total{x="by (y)", z=~"b|c"}[5m] offset 1h)) / on (job) group_left max(b:c) > 0.5'
    reads = used(expr)
    assert reads.series == {"a_total": {"x", "z"}, "b:c": set()}
    assert reads.grouped == {"stage", "le", "job"}
    assert used("increase(a[$__rate_interval]) and b unless 1e3 == bool c").series.keys() == {"a", "b", "c"}


@pytest.mark.parametrize("alert", promql.alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["alert"].startswith("Pdq")
    assert alert["labels"]["severity"] in {"page", "ticket"}
    assert alert["annotations"].keys() == {"summary", "runbook"}
    told = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
    reads = used(alert["expr"])
    assert told <= reads.grouped | {"service", "instance"}, "a label that the alert does not have"


def test_the_alerts_are_those_that_are_needed() -> None:
    names = {rule["alert"] for rule in promql.alerts()}
    assert {"PdqOldestJob", "PdqDeadLetters", "PdqKvRatioZero", "PdqNoWorkers", "PdqRedeliveries"} <= names


def test_what_is_scraped_and_provisioned_fits_together() -> None:
    prometheus = document("infra/prometheus/prometheus.yml")
    assert prometheus["rule_files"] == ["rules.yml"] and (PROMETHEUS / "rules.yml").exists()
    jobs = {job["job_name"] for job in prometheus["scrape_configs"]}
    named = {job for query in EVERY for job in re.findall(r'job="(\w+)"', query.expr)}
    assert named <= jobs
    sources = {
        source["uid"]: source for source in document("infra/grafana/provisioning/datasources/pdq.yaml")["datasources"]
    }
    assert {source["type"] for source in sources.values()} == {"prometheus", "jaeger"}
    (provider,) = document("infra/grafana/provisioning/dashboards/pdq.yaml")["providers"]
    assert provider["type"] == "file" and provider["options"]["path"].endswith("/dashboards")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not installed")
def test_promtool_agrees() -> None:
    for arguments in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "tests.yml"],
    ):
        done = subprocess.run(
            ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
