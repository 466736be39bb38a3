"""Memory of a GPU at its limit: what is measured, and what is said when it does not suffice."""

import gc
from pathlib import Path

import pytest
import torch

from baton.errors import ConfigError
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model, find_stable_prompts

pytest.importorskip("triton")

from node_engine.model.gpu.decode_graphs import DecodeGraphs
from node_engine.model.gpu.memory_profile import profile_device_memory, run_widest_steps
from node_engine.model.gpu.step_inputs import DeviceInputs
from tests.gpu import engine_comparisons

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]


def test_widest_steps_fit_into_what_was_measured(tmp_path: Path) -> None:
    engine = load_model_engine(build_model("llama", tmp_path), device="cuda")
    limits = StepLimits(max_num_seqs=8, max_batched_tokens=192)
    memory = profile_device_memory(engine, limits, num_graphs=4)
    assert 0 < memory.weight_bytes < memory.total_bytes
    assert 0 < memory.activation_bytes < memory.free_bytes < memory.total_bytes
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_widest_steps(engine, limits)
    assert torch.cuda.max_memory_allocated() - before <= memory.activation_bytes
    engine_comparisons.bind_engine(engine)
    [tokens] = engine_comparisons.generate_in_chunks(engine, [(1, 2, 3)], 4)
    assert len(tokens) == 4


@pytest.mark.parametrize("captured", [0, 1])
def test_steps_without_graphs_give_equal_tokens(
    captured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has no memory left during a capture, also after the first graph."""
    folder = build_model("llama", tmp_path)
    (stable,) = find_stable_prompts(folder, (33,), 12)
    engine = load_model_engine(folder, dtype="float32", device="cuda", max_num_seqs=4)
    engine_comparisons.bind_engine(engine)
    is_capturing = torch.cuda.is_current_stream_capturing
    run_step, seen = DecodeGraphs._run_step, 0

    def run_or_fail(graphs: DecodeGraphs, rows: int, inputs: DeviceInputs) -> None:
        nonlocal seen
        if is_capturing():
            seen += 1
            if seen > captured:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        run_step(graphs, rows, inputs)

    monkeypatch.setattr(DecodeGraphs, "_run_step", run_or_fail)
    engine.warm_up(64)
    assert seen == captured + 1
    [tokens] = engine_comparisons.generate_in_chunks(engine, [stable.prompt], 12)
    assert tokens == list(stable.reference_tokens)


def test_a_model_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    folder = build_model("llama", tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(ConfigError, match=r"does not fit .* need \d+ bytes .* were free"):
            load_model_engine(folder, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
