"""The section `engine` over a tiny model on the CPU: the same calls as on a GPU."""

from pathlib import Path

import pytest

from baton.types import SamplingParams
from benchmarks.device import engine_steps, fp8_gains
from benchmarks.device.engine_loads import (
    DecodeRun,
    EngineSizes,
    LoadedEngine,
    profile_decode,
    profile_steps,
    time_decode,
)
from benchmarks.device.engine_steps import EngineCases
from tests.unit.benchmarks.device.tiny_run import make_tiny_run

pytestmark = pytest.mark.slow

SIZES = EngineSizes(max_model_len=256, max_num_seqs=4, max_batched_tokens=64, cache_bytes=1 << 20)
CASES = EngineCases(
    decode=((1, 20), (4, 32)),
    sampled=((2, 32),),
    prefill=(16, 40),
    profiled=((1, 20),),
    mixed=(2, 32, 16),
    steps=4,
)


def test_every_step_stands_beside_its_bound(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    engine_steps.measure(run, CASES, SIZES)
    rows = run.list_section_rows()
    assert [row.name for row in rows] == [
        "gpu/engine/decode_batch_1_of_20",
        "gpu/engine/decode_batch_4_of_32",
        "gpu/engine/prefill_16",
        "gpu/engine/prefill_40",
        "gpu/engine/sampled_decode_batch_2_of_32",
    ]
    for row in rows:
        assert row.unit == "ms"
        assert row.limit
        assert row.share == pytest.approx(row.limit / row.value)
        assert row.command == "some command"
    assert run.notes == []


def test_fp8_is_left_out_with_a_reason_where_it_cannot_run(tmp_path: Path) -> None:
    run = make_tiny_run(tmp_path)
    fp8_gains._measure_engine(run, CASES, SIZES)
    assert len(run.notes) == 1
    assert run.notes[0].startswith("engine: steps: the engine ")
    assert "fp8" in run.notes[0]
    assert run.rows == []


def test_steps_follow_one_another_as_a_scheduler_asks_for_them(tmp_path: Path) -> None:
    loaded = LoadedEngine(make_tiny_run(tmp_path).model, "cpu", SIZES)
    decoding = DecodeRun(loaded, batch=3, context=30, max_steps=4)
    first = decoding.list_slices()
    decoding.run_step()
    second = decoding.list_slices()
    assert [slice_.start for slice_ in first] == [30] * 3
    assert [slice_.start for slice_ in second] == [31] * 3
    assert [slice_.sequence_id for slice_ in first] == [slice_.sequence_id for slice_ in second]
    assert all(len(slice_.block_table) * 16 >= 30 + 4 + 2 for slice_ in first)
    sampled = SamplingParams(max_tokens=100, temperature=1.0, top_p=0.9, seed=1)
    assert time_decode(loaded, 2, 32, 4, sampled) > 0
    assert profile_decode(loaded, 2, 32, steps=2).steps == 2
    assert profile_steps(loaded, 2, 32, 16, steps=2).launches_per_step == 0
    loaded.close()
