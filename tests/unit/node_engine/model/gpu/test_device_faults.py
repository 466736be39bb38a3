"""A GPU that fails, or has no memory left, wherever the engine can meet it. No kernel runs here."""

import mmap
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("triton")

from baton.errors import OutOfMemory
from baton.kv.blocks import KVLayout
from baton.models.model_identity import UNQUANTIZED
from baton.types import BlockIndex, SamplingParams
from kv_kernels.reference.torch_kernels import TorchKernels
from node_engine.core.step.engine import DeviceLost
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.gpu import device_cache, graph_capture
from node_engine.model.gpu.decode_graphs import DecodeGraphs, capture_decode_graphs
from node_engine.model.gpu.gpu_engine import GpuEngine

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
ERRORS = [(LOST, DeviceLost, "illegal memory access"), (FULL, OutOfMemory, "lower --max-batched")]
CONFIG: Any = SimpleNamespace(
    num_layers=1,
    hidden_size=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    vocab_size=16,
    windows=(None,),
)
PARAMS = SamplingParams(8, temperature=0.0)


def decode_batch(position: int = 0, token: int = 1) -> StepBatch:
    spec = SampleSpec(PARAMS, 0, position + 1)
    table = [BlockIndex(0), BlockIndex(1)]
    return StepBatch((SequenceSlice(SequenceId(1), (token,), position, table, spec),))


class UnusedModel:
    """A model that computes nothing."""

    quantization = UNQUANTIZED


class FailingModel(UnusedModel):
    """A model whose forward pass raises the given error, as a failing GPU makes torch do."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def forward(self, *_: object, **__: object) -> None:
        raise self.error


class FakeLauncher:
    """Launches nothing, and fails at one launch or when its tokens are read."""

    def __init__(self, error: Exception, failing_launch: int, *, at_read: bool = False) -> None:
        self._error = error
        self._failing_launch, self._at_read = failing_launch, at_read
        self._launches = 0

    def launch(self, batch: StepBatch, **_: object) -> Any:
        self._launches += 1
        fails = self._launches == self._failing_launch
        if fails and not self._at_read:
            raise self._error
        return FakeLaunchedStep(batch, self._error if fails else None)


class FakeLaunchedStep:
    """A launched step of one sequence that samples token 7."""

    logits = torch.zeros(1, 16)
    hidden = None
    draw_by_slice = MappingProxyType({0: 0})

    def __init__(self, batch: StepBatch, error: Exception | None) -> None:
        specs = tuple(slice_.sample_spec for slice_ in batch.slices)
        self.inputs = SimpleNamespace(sample_specs=specs, drawn_slice_indices=(0,))
        self._error = error

    def read_tokens(self) -> list[int]:
        if self._error is not None:
            raise self._error
        return [7]


def make_engine(model: UnusedModel | None = None, launcher: object = None) -> GpuEngine:
    engine = GpuEngine(
        CONFIG,
        model or UnusedModel(),  # type: ignore[arg-type]
        TorchKernels(),
        LAYOUT,
        torch.device("cpu"),
        64,
        b"",
        max_graph_rows=0 if launcher is None else 4,
    )
    engine.bind_cache(memoryview(mmap.mmap(-1, 4 * LAYOUT.block_bytes)), 4)
    if launcher is not None:
        engine._launcher = launcher  # type: ignore[assignment]
    return engine


def raise_error(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(("error", "expected", "message"), ERRORS)
def test_failure_of_an_eager_step(
    error: Exception, expected: type[Exception], message: str
) -> None:
    with pytest.raises(expected, match=message):
        make_engine(FailingModel(error)).run(decode_batch())


def run_steps(engine: GpuEngine, count: int) -> None:
    for position in range(count):
        [result] = engine.run(decode_batch(position, 7))
        assert result.token_id == 7


@pytest.mark.parametrize("at_read", [False, True])
@pytest.mark.parametrize("failing_launch", [1, 2, 3])
@pytest.mark.parametrize(("error", "expected", "message"), ERRORS)
def test_failure_of_a_graph_or_of_one_launched_ahead(
    error: Exception, expected: type[Exception], message: str, failing_launch: int, at_read: bool
) -> None:
    """The engine launches the following step before it reads the tokens of the one asked for."""
    engine = make_engine(launcher=FakeLauncher(error, failing_launch, at_read=at_read))
    if error is FULL and failing_launch > 1 and not at_read:
        run_steps(engine, 4)  # the step is launched again when it is asked for
        return
    with pytest.raises(expected, match=message):
        run_steps(engine, 4)


@pytest.mark.parametrize(("error", "expected", "message"), ERRORS)
def test_failure_of_a_block_copy(
    error: Exception, expected: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(device_cache, "copy_blocks_between", raise_error(error))
    with pytest.raises(expected, match=message):
        engine.save_blocks([BlockIndex(2)])
    engine.load_blocks([BlockIndex(1)])  # marks them; the next step copies
    with pytest.raises(expected, match=message):
        engine.run(StepBatch(()))


class CaptureCase:
    """A capture that fails after it has captured something."""

    def __init__(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[weakref.ref[DecodeGraphs]] = []
        self.was_alive_when_freed: list[bool] = []
        self._error = error
        monkeypatch.setattr(DecodeGraphs, "capture", self._make_capture())
        monkeypatch.setattr(graph_capture, "capturing_on_side_stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty_cache)

    def _make_capture(self) -> Callable[..., None]:
        def capture(graphs: DecodeGraphs, *_: object) -> None:
            self.captured.append(weakref.ref(graphs))
            raise type(self._error)(*self._error.args)  # a new one, which nobody else keeps

        return capture

    def _empty_cache(self) -> None:
        self.was_alive_when_freed += [graphs() is not None for graphs in self.captured]

    def capture(self) -> DecodeGraphs | None:
        model: Any = None
        cache: Any = None
        return capture_decode_graphs(model, cache, 8, 64, lambda: True)


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted when stream is capturing\nmore"), FULL, LOST]
)
def test_graphs_that_cannot_be_captured_are_freed_and_reported_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver refuses the capture and the device works on."""
    case = CaptureCase(error, monkeypatch)
    with capture_logs() as lines:
        assert case.capture() is None
    assert case.was_alive_when_freed == [False]
    [line] = lines
    assert line["log_level"] == "warning"
    assert line["reason"] == str(error).partition("\n")[0]


def test_a_device_lost_during_capture_is_not_a_missing_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CaptureCase(LOST, monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", raise_error(LOST))
    engine = make_engine()
    engine._max_graph_rows = 4
    monkeypatch.setattr("node_engine.model.gpu.gpu_engine.iter_warm_up_steps", lambda *_: ())
    with capture_logs() as lines, pytest.raises(DeviceLost, match="illegal memory access"):
        engine.warm_up(16)
    assert lines == []
