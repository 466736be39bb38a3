"""What /metrics exposes before anything has happened, and under which names."""

from collections import Counter

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from baton.config import Config
from coordinator.core.known_labels import known_labels
from coordinator.core.tenants import DEFAULT_CLASS, Tenants
from coordinator.dispatcher import Dispatcher
from coordinator.metrics import PHASES, STAGES, Metrics

CLASSES = ("premium", "standard", "batch")


def scraped(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Label values in their order, by the name of the sample."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_series_are_there_at_zero_from_the_start() -> None:
    seen = scraped(Metrics(Dispatcher(Config())))
    for name, known in known_labels((DEFAULT_CLASS,)).items():
        assert {tuple(sorted(labels)) for labels in seen[name]} == {tuple(sorted(labels)) for labels in known}, name
        assert set(seen[name].values()) == {0.0}, name
    for quantity in ("ttft", "tpot"):
        counts = seen[f"baton_request_{quantity}_seconds_count"]
        assert counts == {(DEFAULT_CLASS,): 0.0, ("internal",): 0.0}
    assert seen["baton_request_stage_seconds_count"].keys() == {(stage,) for stage in STAGES}
    assert seen["baton_role_switch_seconds_count"].keys() == {(phase,) for phase in PHASES}


async def test_classes_of_another_file_of_tenants_have_their_series_at_the_next_scrape() -> None:
    dispatcher = Dispatcher(Config())
    metrics = Metrics(dispatcher)
    scraped(metrics)
    dispatcher.reload_tenants(Tenants(classes=CLASSES))
    seen = scraped(metrics)
    for name in ("baton_requests_total", "baton_rejected_total"):
        assert {each for labels in seen[name] for each in labels} >= {*CLASSES, "internal"}
    assert seen["baton_request_ttft_seconds_count"].keys() >= {(each,) for each in CLASSES}


async def test_what_was_counted_is_shown_instead_of_zero() -> None:
    dispatcher = Dispatcher(Config())
    metrics = Metrics(dispatcher)
    dispatcher.brain.counters.requests["length", "default"] = 7
    dispatcher.brain.counters.nodes_lost["node_gone"] = 2
    seen = scraped(metrics)
    assert sum(seen["baton_requests_total"].values()) == 7
    assert seen["baton_nodes_lost_total"]["node_gone",] == 2
    assert metrics.counters()['baton_nodes_lost_total{reason="node_gone"}'] == 2
    assert 'baton_nodes_lost_total{reason="stalled"}' not in metrics.counters(), "Status tells what was counted"


async def test_no_counter_and_gauge_share_a_name() -> None:
    """OpenMetrics names a counter without `_total`, where it would meet a gauge of that name."""
    text = generate_latest(Metrics(Dispatcher(Config())).registry).decode()
    names = [line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE ")]
    assert [name for name, times in Counter(names).items() if times > 1] == []
