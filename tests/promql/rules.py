"""Alerting rules and promtool's test files for them, both in YAML."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from tests.promql.evaluate import evaluate
from tests.promql.store import Labels, Store, as_labels


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    hold: float  # seconds for which the expression must be true
    labels: Mapping[str, str]


def seconds(text: str) -> float:
    return float(promql_parser.parse_duration(text).total_seconds())


def load_alerts(path: Path) -> dict[str, Alert]:
    groups = yaml.safe_load(path.read_text())["groups"]
    found = [
        Alert(
            rule["alert"],
            rule["expr"],
            seconds(rule["for"]) if "for" in rule else 0.0,
            rule.get("labels", {}),
        )
        for group in groups
        for rule in group["rules"]
    ]
    return {alert.name: alert for alert in found}


def firing(alert: Alert, store: Store, at: float, interval: float) -> set[Labels]:
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
        as_labels({**dict(labels), **alert.labels}) for labels, began in since.items() if last - began >= alert.hold
    }


@dataclass(frozen=True)
class Expected:
    """One look of a test file at one alert."""

    test: str
    alert: str
    at: float
    store: Store
    interval: float
    labels: frozenset[Labels]


def load_tests(path: Path) -> Iterator[Expected]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    interval = seconds(document.get("evaluation_interval", "1m"))
    for test in document["tests"]:
        store = Store()
        for series in test["input_series"]:
            store.add_series(series["series"], str(series["values"]), seconds(test["interval"]))
        for look in test["alert_rule_test"]:
            wanted = frozenset(as_labels(one["exp_labels"]) for one in look.get("exp_alerts", ()))
            at = seconds(look["eval_time"])
            yield Expected(test["name"], look["alertname"], at, store, interval, wanted)
