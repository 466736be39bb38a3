"""What /metrics exposes before anything has happened, and under which names."""

from collections import Counter

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.config.settings import Config
from coordinator.core.admission.tenants import DEFAULT_CLASS, TenantTable
from coordinator.node_links.dispatcher import Dispatcher
from coordinator.operators.metric_labels import list_known_labels
from coordinator.operators.metrics import ROLE_SWITCH_PHASES, TTFT_STAGES, CoordinatorMetrics

CLASSES = ("premium", "standard", "batch")


def scrape_samples(metrics: CoordinatorMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Label values in their order, by the name of the sample."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_series_start_at_zero() -> None:
    seen = scrape_samples(CoordinatorMetrics(Dispatcher(Config())))
    for name, known in list_known_labels((DEFAULT_CLASS,)).items():
        assert {tuple(sorted(labels)) for labels in seen[name]} == {
            tuple(sorted(labels)) for labels in known
        }, name
        assert set(seen[name].values()) == {0.0}, name
    for quantity in ("ttft", "tpot"):
        counts = seen[f"baton_request_{quantity}_seconds_count"]
        assert counts == {(DEFAULT_CLASS,): 0.0, ("internal",): 0.0}
    assert seen["baton_request_stage_seconds_count"].keys() == {(stage,) for stage in TTFT_STAGES}
    assert seen["baton_role_switch_seconds_count"].keys() == {
        (phase,) for phase in ROLE_SWITCH_PHASES
    }


async def test_reloaded_tenant_classes_have_series_at_the_next_scrape() -> None:
    dispatcher = Dispatcher(Config())
    metrics = CoordinatorMetrics(dispatcher)
    scrape_samples(metrics)
    dispatcher.reload_tenants(TenantTable(classes=CLASSES))
    seen = scrape_samples(metrics)
    for name in ("baton_requests_total", "baton_rejected_total"):
        assert {each for labels in seen[name] for each in labels} >= {*CLASSES, "internal"}
    assert seen["baton_request_ttft_seconds_count"].keys() >= {(each,) for each in CLASSES}


async def test_counted_series_show_their_value_instead_of_zero() -> None:
    dispatcher = Dispatcher(Config())
    metrics = CoordinatorMetrics(dispatcher)
    dispatcher.brain.counters.requests["length", "default"] = 7
    dispatcher.brain.counters.lost_nodes["node_gone"] = 2
    seen = scrape_samples(metrics)
    assert sum(seen["baton_requests_total"].values()) == 7
    assert seen["baton_nodes_lost_total"]["node_gone",] == 2
    assert metrics.get_counter_values()['baton_nodes_lost_total{reason="node_gone"}'] == 2
    assert 'baton_nodes_lost_total{reason="stalled"}' not in metrics.get_counter_values(), (
        "Status tells what was counted"
    )


async def test_no_counter_and_gauge_share_a_name() -> None:
    """OpenMetrics names a counter without `_total`, where it would meet a gauge of that name."""
    text = generate_latest(CoordinatorMetrics(Dispatcher(Config())).registry).decode()
    names = [
        line.split()[2].removesuffix("_total")
        for line in text.splitlines()
        if line.startswith("# TYPE ")
    ]
    assert [name for name, times in Counter(names).items() if times > 1] == []
