"""The dashboard and the alert rules in examples/monitoring: what they name is exported, and promtool accepts them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml
from support.docs_pages import ROOT

from dispatchers.telemetry import prometheus
from dispatchers.telemetry.events import Activity, Attempt, Backlog, Levels

FOLDER = ROOT / "examples" / "monitoring"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]
EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in RULES] + PANELS

SELECTOR = re.compile(r"\b(outbox_\w+)(?:\{(.*?)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"(.*?)"')
GROUPING = re.compile(r"(?:by|on) \((.*?)\)")
OF_THE_SCRAPE = {"instance", "job", "le", "database"}  # the last one is that of a fleet
PAGE = (ROOT / "docs" / "monitoring.md").read_text()

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (on Debian: apt-get install prometheus)"
)


def exported() -> dict[str, set[str]]:
    """The samples of the dispatcher, each with its labels."""
    registry = prometheus_client.CollectorRegistry()
    observe = prometheus.observer(registry)
    one = {"crm": 1}
    attempts = [Attempt("crm", "crm.upsert", is_lookup, "unknown", 1.0, 1.0) for is_lookup in (False, True)]
    observe(
        Activity(
            attempts=attempts,
            claims=one,
            settlements={("crm", "retry"): 1},
            lost_leases=one,
            blocked_seconds={("crm", "crm.upsert"): 1.0},
            skipped_instants={"report": 1},
        )
    )
    observe(
        Levels(
            in_flight=one,
            claimed_ahead=one,
            permits=one,
            callbacks_waiting=1,
            unsettled=1,
            throttled={"crm": "paused"},
            suspended=True,
            served=True,
        )
    )
    observe(
        Backlog(
            entries={("crm", "pending"): 1},
            oldest_due_seconds={"crm": 1.0},
            blocked_groups=1,
            schedule_lag_seconds={"report": 1.0},
        )
    )
    return {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_every_metric_and_label_that_is_queried_is_exported(name: str, expression: str) -> None:
    samples = exported()
    selectors = SELECTOR.findall(expression)

    assert selectors
    for metric, matchers in selectors:
        assert metric in samples
        assert {label for label, _, _ in MATCHER.findall(matchers)} <= samples[metric]
    labels = {label.strip() for group in GROUPING.findall(expression) for label in group.split(",")}
    assert labels <= set.union(*(samples[metric] for metric, _ in selectors)) | OF_THE_SCRAPE


def test_every_value_that_is_queried_is_one_of_the_page() -> None:
    values = {
        value
        for _, expression in EXPRESSIONS
        for _, matchers in SELECTOR.findall(expression)
        for label, _, alternatives in MATCHER.findall(matchers)
        if label != "destination"
        for value in alternatives.split("|")
    }

    assert values == {"uncertain", "delivered", "replayed", "callback_retry"}
    assert all(f"`{value}`" in PAGE for value in values)


def test_the_dashboard_shows_every_metric_of_the_dispatcher() -> None:
    shown = {metric for _, expression in PANELS for metric, _ in SELECTOR.findall(expression)}

    bases = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exported()}
    assert {re.sub(r"_bucket$", "", metric) for metric in shown} == {
        name for name in bases if f"{name}_total" not in bases
    }


def test_the_page_about_monitoring_names_every_alert() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()

    assert [rule["alert"] for rule in RULES if f"`{rule['alert']}`" not in page] == []


@needs_promtool
def test_promtool_accepts_the_rules_and_sees_each_alert_fire() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")

    tested = (FOLDER / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in RULES if f'"{rule["alert"]}"' not in tested] == []


@needs_promtool
def test_promtool_parses_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [expression.replace("$__rate_interval", "5m") for _, expression in PANELS]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    promtool("check", "rules", str(file))


def promtool(*arguments: str) -> None:
    run = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
