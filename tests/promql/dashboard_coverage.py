"""What the dashboard shows and what the alerts look at, against scrapes of a cluster that served
requests."""

import json
import math
import re
from collections import Counter
from pathlib import Path

import promql_parser

from tests.promql.evaluate import evaluate
from tests.promql.rules import load_alerts
from tests.promql.sample_store import SampleStore

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "baton.json"

GPU_METRICS = frozenset({"baton_mfu", "baton_mbu"})  # that nodes on CPUs do not have


def list_dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def find_blank_queries(before: str, after: str, *, has_gpus: bool = False) -> list[str]:
    """Of the dashboard, what shows nothing, given what /metrics said before any request and after
    some. Without GPUs, panels about them may be blank."""
    store = SampleStore()
    store.add_scrape(before, 0.0)
    store.add_scrape(after, 60.0)
    blank = []
    for query in list_dashboard_queries():
        if not has_gpus and any(name in query for name in GPU_METRICS):
            continue
        found = evaluate(query.replace("$__rate_interval", "1m"), store, 60.0)
        if all(math.isnan(value) for value in found.values()):
            blank.append(query)
    return blank


def find_unknown_selectors(scrape: str, *, has_gpus: bool = False) -> list[str]:
    """Selectors of alerts and dashboard that no series of the scrape can ever match, by their names
    and labels. Without GPUs, those of GPUs are left out."""
    store = SampleStore()
    store.add_scrape(scrape, 0.0)
    unknown = []
    expressions = [alert.expression for alert in load_alerts(RULES).values()]
    for expression in [*expressions, *list_dashboard_queries()]:
        for selector in list_selectors(expression.replace("$__rate_interval", "1m")):
            if not has_gpus and selector.name in GPU_METRICS:
                continue
            asked = {matcher.name for matcher in selector.matchers.matchers}
            series = store.iter_points(selector.name or "")
            if not any(asked <= dict(labels).keys() for labels, _ in series):
                unknown.append(selector.prettify())
    return unknown


def find_shared_names(scrape: str) -> list[str]:
    """Names that a counter has, without `_total`, and another metric too: OpenMetrics gives them to
    one only."""
    types = [
        line.split()[2].removesuffix("_total")
        for line in scrape.splitlines()
        if line.startswith("# TYPE ")
    ]
    return [name for name, times in Counter(types).items() if times > 1]


def list_selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(expression), visit)
    unique = {each.prettify(): each for each in found}
    named = set(re.findall(r"\bbaton_\w+", expression)) - {each.name for each in unique.values()}
    assert not named, f"not found in {expression}: {named}"
    return list(unique.values())
