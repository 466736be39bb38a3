"""The alerting rules against series with and without tenants: by our own evaluation of PromQL, and
by promtool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.promql.evaluate import evaluate
from tests.promql.rules import ExpectedAlert, find_firing, load_alerts, load_rule_tests
from tests.promql.sample_store import SampleStore

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
RULE_TESTS = ROOT / "deploy" / "prometheus" / "tests" / "rules_test.yml"
ALERTS = load_alerts(RULES)
EXPECTED_ALERTS = list(load_rule_tests(RULE_TESTS))


@pytest.mark.parametrize(
    "look",
    EXPECTED_ALERTS,
    ids=[f"{look.alert_name}, {look.test_name}, {look.at_seconds:g} s" for look in EXPECTED_ALERTS],
)
def test_alerts_fire_when_they_should(look: ExpectedAlert) -> None:
    assert (
        find_firing(ALERTS[look.alert_name], look.store, look.at_seconds, look.interval_seconds)
        == look.firing_labels
    )


@pytest.mark.slow
def test_promtool_accepts_the_rule_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip(
            "promtool is not here (it comes with Prometheus): "
            "only our own evaluation has looked at the rules"
        )
    done = subprocess.run(
        [promtool, "test", "rules", str(RULE_TESTS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_test_and_stays_silent_in_another() -> None:
    assert {look.alert_name for look in EXPECTED_ALERTS if look.firing_labels} == ALERTS.keys()
    assert {look.alert_name for look in EXPECTED_ALERTS if not look.firing_labels} == ALERTS.keys()


def test_alerts_about_requests_have_no_class_of_their_own() -> None:
    """Classes are names that the file of tenants gives; the cluster's own requests are the one
    class to leave out."""
    for alert in ALERTS.values():
        for selector in re.findall(
            r"baton_(?:requests|rejected|request_\w+)\w*\{([^}]*)\}", alert.expression
        ):
            assert 'class!="internal"' in selector, alert.name
            assert not re.search(r'class(=|=~)"', selector), alert.name


def test_rates_are_extrapolated_as_prometheus_does() -> None:
    """Figures of Prometheus 2.42, by promtool: a counter from zero, one that was reset, and one
    with half a window."""
    store = SampleStore()
    store.add_series("steady", "0+10x40", 15)
    store.add_series("reset", "0+10x10 0+10x29", 15)
    store.add_series("late", "_x10 5+10x29", 15)
    figures = {
        name: evaluate(f"increase({name}[5m])", store, 307)[()]
        for name in ("steady", "reset", "late")
    }
    assert figures == pytest.approx({"steady": 200.0, "reset": 189.473684, "late": 109.666667})
