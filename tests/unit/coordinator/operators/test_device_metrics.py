"""What /metrics and the dashboard say of the devices that nodes compute on."""

from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster_link.report_types import DeviceReport
from baton.types import Role
from coordinator.operators.brain_collector import BrainCollector
from tests.promql.dashboard_coverage import (
    GPU_METRICS,
    find_blank_queries,
    find_unknown_selectors,
)
from tests.unit.coordinator.core.brain_harness import BrainHarness

H200 = DeviceReport("cuda:0", "NVIDIA H200", 0, 141 * 10**9, 10**11, mfu=0.25, mbu=0.0)


def scrape(devices: dict[str, DeviceReport | None]) -> str:
    """What is exposed of a cluster whose decode nodes have reported these devices."""
    bench = BrainHarness()
    for name, device in devices.items():
        bench.send_heartbeat(bench.join_node(name, Role.DECODE), device=device)
    bench.join_node("silent", Role.DECODE)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(BrainCollector(bench.brain, lambda: bench.now))
    return generate_latest(registry).decode()


def device_lines(text: str) -> set[str]:
    names = "baton_device_info", "baton_device_memory", *GPU_METRICS
    return {line for line in text.splitlines() if line.startswith(names)}


def test_devices() -> None:
    cpu = DeviceReport("cpu", 'A "fast" processor', 8, 16 * 10**9, 4 * 10**9)
    assert device_lines(scrape({"d0": H200, "d1": cpu, "d2": None})) == {
        'baton_device_info{device="cuda:0",name="NVIDIA H200",node="d0",threads="0"} 1.0',
        'baton_device_info{device="cpu",name="A \\"fast\\" processor",node="d1",threads="8"} 1.0',
        'baton_device_memory_bytes{node="d0"} 1.41e+11',
        'baton_device_memory_bytes{node="d1"} 1.6e+10',
        'baton_device_memory_used_bytes{node="d0"} 1e+11',
        'baton_device_memory_used_bytes{node="d1"} 4e+09',
        'baton_mfu{node="d0"} 0.25',
        'baton_mbu{node="d0"} 0.0',
    }


def test_memory_that_cannot_be_measured_has_no_series() -> None:
    lines = device_lines(scrape({"d0": DeviceReport()}))
    assert lines == {'baton_device_info{device="cpu",name="",node="d0",threads="0"} 1.0'}


def test_packed_weights_have_a_series_if_there_are_any() -> None:
    packed = DeviceReport(packed_weight_bytes=10**9, packed_weight_source="cache file")
    lines = scrape({"d0": packed, "d1": DeviceReport()}).splitlines()
    assert [line for line in lines if line.startswith("baton_packed_weight_bytes")] == [
        'baton_packed_weight_bytes{node="d0",source="cache file"} 1e+09'
    ]


def test_dashboard_shows_devices() -> None:
    text = scrape({"d0": H200})
    unknown = find_unknown_selectors(text, has_gpus=True)
    blank = find_blank_queries(text, text, has_gpus=True)
    names = "baton_device", *GPU_METRICS
    assert [each for each in (*unknown, *blank) if any(name in each for name in names)] == []
    nothing = scrape({"d0": None})
    shown = [
        query
        for query in find_blank_queries(nothing, nothing, has_gpus=True)
        if any(name in query for name in names)
    ]
    assert shown == [
        "baton_mfu",
        "baton_mbu",
        "baton_device_memory_used_bytes / baton_device_memory_bytes",
    ]
