"""What BaseEngine does besides the arithmetic: errors, copies, progress. The arithmetic is in
tests/parity."""

import io
import sys
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError, OutOfMemory
from baton.types import BlockIndex, SamplingParams
from kv_kernels.reference.host_memory import MemoryPinError
from node_engine.core.step.engine import DeviceLost
from node_engine.core.step.step_batch import (
    SampleSpec,
    SequenceId,
    SequenceSlice,
    SliceResult,
    StepBatch,
)
from node_engine.model.common.base_engine import BaseEngine
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
STEP = StepBatch(
    (SequenceSlice(SequenceId(1), (3, 4), 0, [BlockIndex(2)], SampleSpec(GREEDY, 0, 2)),)
)
BLOCKS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.getbasetemp() / "models")


@pytest.fixture
def engine(folder: Path) -> BaseEngine:
    return load_model_engine(folder)


def bound(engine: BaseEngine) -> bytearray:
    memory = bytearray(BLOCKS * engine.layout.block_bytes)
    engine.bind_cache(memoryview(memory), BLOCKS)
    return memory


def test_engine_properties_match_the_model_folder(folder: Path) -> None:
    engine = load_model_engine(
        folder, dtype="bfloat16", device="cpu", block_size=8, max_model_len=100
    )
    layout = engine.layout
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (2, 2, 16)
    assert (layout.block_size, layout.dtype) == (8, "bfloat16")
    assert (engine.vocab_size, engine.max_model_len) == (512, 100)
    assert engine.eos_token_ids == ()


def test_run_before_bind_cache_is_refused(engine: BaseEngine) -> None:
    with pytest.raises(RuntimeError, match="before bind"):
        engine.run(STEP)


def test_step_of_block_copies_alone(engine: BaseEngine) -> None:
    memory = bound(engine)
    engine.run(STEP)
    size = engine.layout.block_bytes
    block = bytes(memory[2 * size : 3 * size])
    assert any(block)
    assert engine.run(StepBatch((), block_copies=((BlockIndex(2), BlockIndex(0)),))) == ()
    assert bytes(memory[:size]) == block


def test_unsampled_slices_return_no_token(engine: BaseEngine) -> None:
    bound(engine)
    slice_ = STEP.slices[0]
    silent = SequenceSlice(SequenceId(2), (5,), 0, [BlockIndex(1)], None)
    first, second, third = engine.run(StepBatch((silent, slice_, silent)))
    assert (first, third) == (SliceResult(), SliceResult())
    assert second.token_id is not None
    assert engine.run(STEP) == (second,)
    assert engine.run(StepBatch((silent,))) == (SliceResult(),)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 1 bytes"
        ),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_torch_out_of_memory_becomes_out_of_memory(
    engine: BaseEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(engine)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("node_engine.model.transformer.Transformer.forward", fail)
    with pytest.raises(OutOfMemory, match="--max-batched-tokens"):
        engine.run(STEP)


def test_lost_device_is_not_a_failed_step(
    engine: BaseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(engine)

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: misaligned address")

    monkeypatch.setattr("node_engine.model.transformer.Transformer.forward", fail)
    with pytest.raises(DeviceLost, match="misaligned"):
        engine.run(STEP)


def test_lost_device_is_not_a_config_error(
    engine: BaseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: the device is lost")

    monkeypatch.setattr(engine._kernels, "memory_as_tensor", fail)
    with pytest.raises(DeviceLost, match="is lost"):
        bound(engine)


def test_other_torch_errors_are_not_translated(engine: BaseEngine) -> None:
    bound(engine)
    beyond = SequenceSlice(SequenceId(1), (10**6,), 0, [BlockIndex(0)], None)
    with pytest.raises(IndexError):
        engine.run(StepBatch((beyond,)))


@pytest.mark.parametrize("watched", [True, False])
def test_weight_loading_shows_progress_on_a_terminal(
    folder: Path, watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: watched  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    load_model_engine(folder)
    assert ("loading weights" in terminal.getvalue()) == watched


def test_pinning_failure_names_the_remedy(
    engine: BaseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: memoryview, dtype: torch.dtype) -> torch.Tensor:
        raise MemoryPinError(f"cudaHostRegister of {memory.nbytes} bytes: invalid argument (1)")

    monkeypatch.setattr(engine._kernels, "memory_as_tensor", refuse)
    with pytest.raises(ConfigError, match=r"invalid argument \(1\).*/dev/shm.*--segment-dir"):
        bound(engine)
