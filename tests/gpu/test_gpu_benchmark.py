"""The sections of the GPU benchmark on an NVIDIA GPU, over a tiny model; skipped without one."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.device.section_run import SectionRun
from tests.unit.benchmarks.device.tiny_run import make_tiny_run

pytest.importorskip("triton")

from benchmarks.device import engine_steps, kernel_shares, limits
from benchmarks.device.engine_loads import EngineSizes
from benchmarks.device.engine_steps import EngineCases
from benchmarks.device.kernel_shares import KernelCases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU here"),
]
SIZES = EngineSizes(max_model_len=512, max_num_seqs=8, max_batched_tokens=256, cache_bytes=1 << 24)
ENGINE_CASES = EngineCases(
    decode=((1, 32), (8, 64)),
    sampled=((2, 32),),
    prefill=(64, 256),
    profiled=((1, 32), (8, 64)),
    mixed=(2, 32, 64),
    steps=8,
)
KERNEL_CASES = KernelCases(decode=((4, 64),), prefill=(256,), large_rows=512, copied_bytes=1 << 20)


@pytest.fixture
def run(tmp_path: Path) -> SectionRun:
    return replace(make_tiny_run(tmp_path), device=torch.device("cuda"), rates=None)


def test_limits_kernels_and_engine_are_measured(run: SectionRun) -> None:
    run.section, run.deadline = "limits", time.perf_counter() + 100.0
    limits.measure_rates(run)
    limits.measure(run)
    run.section = "kernels"
    kernel_shares.measure(run, KERNEL_CASES)
    run.section = "engine"
    engine_steps.measure(run, ENGINE_CASES, SIZES)
    assert run.notes == []
    assert all(row.value > 0 for row in run.rows if "idle" not in row.name)
    names = {row.name for row in run.rows}
    assert {"gpu/limits/read", "gpu/limits/products", "gpu/kernels/blocks_to_host"} <= names
    assert {"gpu/engine/idle_between_steps_batch_8", "gpu/engine/launches_of_mixed_step"} <= names
