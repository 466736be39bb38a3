"""Alerting rules and promtool's test files for them, both in YAML."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.promql.evaluate import evaluate
from tests.promql.sample_store import Labels, SampleStore, sorted_labels


@dataclass(frozen=True)
class AlertRule:
    name: str
    expression: str
    for_seconds: float  # seconds for which the expression must be true
    labels: Mapping[str, str]


def parse_duration(text: str) -> float:
    return float(promql_parser.parse_duration(text).total_seconds())


def load_alerts(path: Path) -> dict[str, AlertRule]:
    groups = yaml.safe_load(path.read_text())["groups"]
    found = [
        AlertRule(
            rule["alert"],
            rule["expr"],
            parse_duration(rule["for"]) if "for" in rule else 0.0,
            rule.get("labels", {}),
        )
        for group in groups
        for rule in group["rules"]
    ]
    return {alert.name: alert for alert in found}


def find_firing(alert: AlertRule, store: SampleStore, at: float, interval: float) -> set[Labels]:
    """The labels of what fires at that time, if the rule is evaluated once an interval from the
    start on."""
    since: dict[Labels, float] = {}
    now = 0.0
    while now <= at:
        active = evaluate(alert.expression, store, now)
        since = {labels: since.get(labels, now) for labels in active}
        now += interval
    last = now - interval
    return {
        sorted_labels({**dict(labels), **alert.labels})
        for labels, began in since.items()
        if last - began >= alert.for_seconds
    }


@dataclass(frozen=True)
class ExpectedAlert:
    """One look of a test file at one alert."""

    test_name: str
    alert_name: str
    at_seconds: float
    store: SampleStore
    interval_seconds: float
    firing_labels: frozenset[Labels]


def load_rule_tests(path: Path) -> Iterator[ExpectedAlert]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    interval = parse_duration(document.get("evaluation_interval", "1m"))
    for test in document["tests"]:
        store = SampleStore()
        for series in test["input_series"]:
            store.add_series(
                series["series"], str(series["values"]), parse_duration(test["interval"])
            )
        for look in test["alert_rule_test"]:
            wanted = frozenset(
                sorted_labels(one["exp_labels"]) for one in look.get("exp_alerts", ())
            )
            at = parse_duration(look["eval_time"])
            yield ExpectedAlert(test["name"], look["alertname"], at, store, interval, wanted)
