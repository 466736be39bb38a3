"""What a node reports of its device: a CPU, and a GPU of a torch that is faked."""

from pathlib import Path

import pytest
import torch

from baton.cluster_link.report_types import DeviceReport
from baton.process.clock import FakeClock
from node_engine.core.metrics.utilization import WorkTotals
from node_engine.core.step.engine import ComputeDevice, DeviceMemory, ModelSize
from node_engine.host.device_monitor import DeviceMonitor, read_cpu_name, read_host_memory
from node_engine.model.common.compute_device import describe_device
from node_engine.paced.paced_engine import PacedEngine

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Processor: 2 GHz\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   6291456 kB\n"
    )
    return tmp_path


def test_cpu(proc: Path) -> None:
    monitor = DeviceMonitor(PacedEngine(), FakeClock(), proc)
    assert monitor.build_report(WorkTotals()) == DeviceReport(
        device="cpu",
        name="A Processor: 2 GHz",
        threads=1,
        memory_total_bytes=8 * GIB,
        memory_used_bytes=2 * GIB,
    )


def test_packed_weights_are_reported(proc: Path) -> None:
    engine = PacedEngine()
    engine.compute_device = ComputeDevice(
        threads=2, packed_weight_bytes=7 * GIB, packed_weight_source="segment"
    )
    report = DeviceMonitor(engine, FakeClock(), proc).build_report(WorkTotals())
    assert (report.packed_weight_bytes, report.packed_weight_source) == (7 * GIB, "segment")


def test_cpu_of_which_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert (read_cpu_name(tmp_path), read_host_memory(tmp_path)) == ("aarch64", None)
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name :\n")
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    assert (read_cpu_name(tmp_path), read_host_memory(tmp_path)) == ("aarch64", None)
    report = DeviceMonitor(PacedEngine(), FakeClock(), tmp_path).build_report(WorkTotals())
    assert (report.memory_total_bytes, report.memory_used_bytes) == (0, 0)


def test_cpu_engine_reports_its_threads() -> None:
    device = describe_device(torch.device("cpu"))
    assert (device.device, device.name) == ("cpu", "")
    assert device.threads == torch.get_num_threads()
    assert device.measure_memory is None


class FakeCuda:
    """The second of two GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.free_bytes: int | None = 131 * GIB  # None: the GPU has failed
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"{name}"[: 1000 * index])
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        assert index == 1
        if self.free_bytes is None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return self.free_bytes, 141 * GIB


def make_gpu_engine() -> PacedEngine:
    """A paced engine in the place of one on a GPU."""
    engine = PacedEngine()
    engine.compute_device = describe_device(torch.device("cuda"))
    engine.model_size = ModelSize(100, 0, 0, (None,))
    return engine


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda(monkeypatch, "NVIDIA H200")
    clock = FakeClock()
    monitor = DeviceMonitor(make_gpu_engine(), clock)
    first = monitor.build_report(WorkTotals())
    assert first == DeviceReport("cuda:1", "NVIDIA H200", 0, 141 * GIB, 10 * GIB)
    clock.advance(1.0)
    gpu.free_bytes = 41 * GIB
    report = monitor.build_report(WorkTotals(flops=1e15, memory_bytes=2.4e12, busy_seconds=1.0))
    assert report.memory_used_bytes == 100 * GIB
    assert report.mbu == pytest.approx(0.5)  # of 4,800 GB/s
    assert report.mfu is None  # the paced engine's dtype is float32, whose peak is not known


def test_gpu_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeCuda(monkeypatch, "NVIDIA H200")
    engine = make_gpu_engine()
    assert engine.compute_device.measure_memory is not None
    assert engine.compute_device.measure_memory() == DeviceMemory(141 * GIB, 10 * GIB)
    gpu.free_bytes = None
    assert engine.compute_device.measure_memory() is None
    assert DeviceMonitor(engine, FakeClock()).build_report(WorkTotals()).memory_total_bytes == 0


def test_unknown_gpu_reports_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch, "NVIDIA X" * 100)
    clock = FakeClock()
    monitor = DeviceMonitor(make_gpu_engine(), clock)
    monitor.build_report(WorkTotals())
    clock.advance(1.0)
    report = monitor.build_report(WorkTotals(1e15, 2.4e12, 1.0))
    assert (report.mfu, report.mbu) == (None, None)
    assert len(report.name) == 100
