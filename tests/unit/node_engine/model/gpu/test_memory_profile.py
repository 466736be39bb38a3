"""The memory of a GPU before the cache is sized: the steps that are run, and what is read.

Triton's interpreter runs the same steps in test_gpu_engine.py; tests/gpu has a GPU."""

from typing import cast

import pytest
import torch

from baton.errors import ConfigError, OutOfMemory
from baton.kv.blocks import KVLayout
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.device_memory import DeviceMemoryProfile
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import StepBatch
from node_engine.model.gpu.memory_profile import iter_widest_steps, profile_device_memory

GIB = 1 << 30


@pytest.mark.parametrize(
    ("sequences", "tokens", "max_model_len", "lengths"),
    [
        (4, 32, 100, [29, 1, 1, 1]),
        (4, 32, 10, [10, 10, 10, 2]),
        (4, 32, 6, [6, 6, 6, 6]),  # no step can be wider
        (64, 16, 100, [1] * 16),
        (1, 16, 100, [16]),
    ],
)
def test_widest_steps_have_all_tokens_and_all_sequences(
    sequences: int, tokens: int, max_model_len: int, lengths: list[int]
) -> None:
    drawn, scored = iter_widest_steps(StepLimits(sequences, tokens), 4, max_model_len)
    for step in (drawn, scored):
        assert [len(slice_.token_ids) for slice_ in step.slices] == lengths
        for slice_ in step.slices:
            assert slice_.sample_spec is not None
            assert set(slice_.block_table) == {0}
            assert 4 * len(slice_.block_table) >= len(slice_.token_ids)
    assert not any(slice_.logprobs_spec for slice_ in drawn.slices)
    assert scored.slices[0].logprobs_spec is not None
    assert len(scored.slices[0].logprobs_spec.target_token_ids) == lengths[0]
    assert isinstance(drawn, StepBatch)


class FakeGpu:
    """torch.cuda of a device of 80 GiB, and an engine with 16 GiB of weights there."""

    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
    max_model_len = 64

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_bytes: int) -> None:
        self.step_bytes = step_bytes
        self.allocated = self.peak = 16 * GIB
        self.cached = 0
        self.widths: list[int] = []
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: self.peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 80 * GIB))

    @property
    def free(self) -> int:
        return 79 * GIB - self.allocated - self.cached

    def empty_cache(self) -> None:
        self.cached = 0

    def bind_cache(self, arena: memoryview, num_blocks: int) -> None:
        assert (len(arena), num_blocks) == (self.layout.block_bytes, 1)

    def run(self, batch: StepBatch) -> None:
        self.widths.append(batch.num_tokens)
        if self.step_bytes > self.free:
            raise OutOfMemory("no memory left for this step")
        self.peak, self.cached = self.allocated + self.step_bytes, self.step_bytes + GIB

    def profile(self, num_graphs: int = 0) -> DeviceMemoryProfile:
        return profile_device_memory(cast(Engine, self), StepLimits(4, 32), num_graphs)


def test_peak_of_the_widest_steps_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, step_bytes=3 * GIB)
    memory = gpu.profile()
    assert gpu.widths == [32, 32]
    assert memory == DeviceMemoryProfile(80 * GIB, 63 * GIB, 16 * GIB, 3 * GIB, 0)


def test_graphs_need_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, step_bytes=3 * GIB)
    few, many = (gpu.profile(count).graph_bytes for count in (1, 20))
    assert 3 * GIB < few < many


def test_steps_that_do_not_fit_are_reported_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        FakeGpu(monkeypatch, step_bytes=64 * GIB).profile()
    message = str(caught.value)
    assert "63.0GiB of 80.0GiB are free, 16.0GiB are weights" in message
    assert "lower --max-batched-tokens or --max-num-seqs" in message
