"""Layers of a step are reported in their order, each once the GPU has computed or copied it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from baton.kv.device_event import DeviceEvent
from node_engine.model.gpu import layer_reporters
from node_engine.model.gpu.layer_reporters import CudaLayerReporter, CudaLayerSaver
from tests.layer_callbacks import FunctionCallback


class FakeCudaRuntime:
    """Stands in for torch.cuda: `num_ended` of the recorded events have ended."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_ended = 0
        self.stream_names: list[str] = ["compute"]
        self.copies: list[tuple[str, int]] = []  # streams and layers
        self.log: list[str] = []

    def make_event(self, *, enable_timing: bool = False) -> "FakeEvent":
        return FakeEvent(self)

    def make_stream(self) -> "FakeStream":
        return FakeStream(self)

    @contextmanager
    def use_stream(self, _: "FakeStream") -> Iterator[None]:
        self.stream_names.append("side")
        yield
        self.stream_names.pop()

    def copy_layer(self, *arguments: object) -> None:
        layer = arguments[-1]
        assert isinstance(layer, int)
        self.copies.append((self.stream_names[-1], layer))


class FakeEvent:
    def __init__(self, gpu: FakeCudaRuntime) -> None:
        self._gpu = gpu
        self._number = -1
        self._stream = ""

    def record(self) -> None:
        self._number, self._stream = self._gpu.num_recorded, self._gpu.stream_names[-1]
        self._gpu.num_recorded += 1

    def query(self) -> bool:
        return self._number < self._gpu.num_ended

    def synchronize(self) -> None:
        self._gpu.log.append(f"wait {self._stream}")
        self._gpu.num_ended = max(self._gpu.num_ended, self._number + 1)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return float(other._number - self._number)


class FakeStream:
    def __init__(self, gpu: FakeCudaRuntime) -> None:
        self._gpu = gpu

    def wait_stream(self, _: object) -> None:
        self._gpu.log.append("side waits for compute")

    def wait_event(self, event: FakeEvent) -> None:
        assert event._stream == "compute"

    def synchronize(self) -> None:
        self._gpu.log.append("drain side")


class ComputeStream:
    def __init__(self, gpu: FakeCudaRuntime) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        self._gpu.log.append("drain compute")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudaRuntime:
    gpu = FakeCudaRuntime()
    monkeypatch.setattr(torch.cuda, "Event", gpu.make_event)
    monkeypatch.setattr(torch.cuda, "Stream", gpu.make_stream)
    monkeypatch.setattr(torch.cuda, "stream", gpu.use_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: ComputeStream(gpu))
    monkeypatch.setattr(layer_reporters, "copy_blocks_between", gpu.copy_layer)
    monkeypatch.setattr(CudaLayerSaver, "_stream", None)
    return gpu


class GroupedCallback(FunctionCallback):
    """A LayerCallback of groups of two layers."""

    layer_ends: Sequence[DeviceEvent] = ()
    num_launches = 0

    def ends_group(self, layer: int) -> bool:
        return layer % 2 == 1 or layer == 4

    def on_launching(self) -> None:
        self.num_launches += 1

    def on_launched(self, layer_ends: Sequence[DeviceEvent]) -> None:
        self.layer_ends = layer_ends


def test_layers_that_are_read_on_the_device_are_announced_before_they_are_reported(
    gpu: FakeCudaRuntime,
) -> None:
    reported: list[int] = []
    callback = GroupedCallback(reported.append)
    reporter = CudaLayerReporter(callback, callback)
    assert callback.num_launches == 1
    with reporter.finished_at_exit():
        for layer in range(5):
            reporter.on_layer_written(layer)
        assert not callback.layer_ends
        gpu.num_ended = 1
        reporter.end_launch()
        ends = [event.query() for event in callback.layer_ends]
        assert ends == [True, False, False, False, False]
        assert reported == []
    assert reported == [0, 1, 2, 3, 4]
    assert gpu.num_recorded == 5
    assert gpu.log == ["wait compute"] * 3
    assert not gpu.copies
    assert reporter.measure_copy_wait() == 0.0


def test_a_failed_step_leaves_nothing_queued(gpu: FakeCudaRuntime) -> None:
    reported: list[int] = []
    callback = GroupedCallback(reported.append)
    reporter = CudaLayerReporter(callback, callback)

    def fail_launch() -> None:
        with reporter.finished_at_exit():
            reporter.on_layer_written(0)
            raise RuntimeError("launch")

    with pytest.raises(RuntimeError, match="launch"):
        fail_launch()
    assert reported == []
    assert gpu.log == ["drain compute"]


def make_saver(reported: list[int]) -> CudaLayerSaver:
    arena, blocks = torch.zeros(2, 3, 1), torch.tensor([1], dtype=torch.int32)
    return CudaLayerSaver(arena, arena, blocks, reported.append)


def test_layers_are_copied_beside_the_step_and_reported_after_their_copies(
    gpu: FakeCudaRuntime,
) -> None:
    reported: list[int] = []
    saver = make_saver(reported)
    with saver.finished_at_exit():
        saver.on_layer_written(0)  # records the ends of the layer and of its copy
        gpu.num_ended = 1
        saver.on_layer_written(1)
        assert reported == []
        gpu.num_ended = 2
        saver.on_layer_written(2)
        assert reported == [0]
    assert reported == [0, 1, 2]
    assert gpu.copies == [("side", 0), ("side", 1), ("side", 2)]
    assert gpu.log == ["side waits for compute", "wait side", "wait side", "drain side"]


def test_no_copy_runs_on_when_the_launch_of_a_step_fails(gpu: FakeCudaRuntime) -> None:
    reported: list[int] = []
    saver = make_saver(reported)

    def fail_launch() -> None:
        with saver.finished_at_exit():
            saver.on_layer_written(0)
            raise RuntimeError("launch")

    with pytest.raises(RuntimeError, match="launch"):
        fail_launch()
    assert reported == []
    assert gpu.log[-1] == "drain side"


def test_the_wait_for_the_last_copy_is_measured(gpu: FakeCudaRuntime) -> None:
    saver = make_saver([])
    with saver.finished_at_exit():
        saver.on_layer_written(0)
    gpu.num_ended = gpu.num_recorded
    # The last copy is event 1 and the end of the step event 2: the copy has ended first.
    assert saver.measure_copy_wait() == 0.0
    saver._queued.events[0].record()
    assert saver.measure_copy_wait() == pytest.approx(0.001)
