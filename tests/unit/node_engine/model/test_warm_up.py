"""What an engine computes before its first request stays within its cache and its lengths, and
changes no answer."""

from pathlib import Path

import pytest

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.common.warm_up import iter_warm_up_steps, list_mixed_warm_up_steps
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model

LENGTHS = (4, 24, 256, 1024)


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_model_len", "max_batched_tokens", "prompts"),
    [
        (16, 256, 4096, 2048, [4, 24, 256, 1024]),
        (16, 256, 4096, 1025, [4, 24, 256, 1024]),
        (16, 256, 4096, 512, [4, 24, 256, 511]),
        (16, 256, 4096, 16, [4, 15]),
        (16, 64, 4096, 2048, [4, 24, 256]),
        (16, 3, 4096, 2048, [4, 24]),
        (16, 2, 4096, 2048, [4]),
        (16, 1, 4096, 2048, []),
        (1, 64, 4096, 2048, [4, 24]),
        (2, 2, 4096, 2048, []),
        (16, 64, 26, 2048, [4, 24]),
        (16, 64, 25, 2048, [4]),
        (16, 64, 1, 2048, []),
    ],
)
def test_warm_up_steps_stay_within_limits(
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_batched_tokens: int,
    prompts: list[int],
) -> None:
    computed: dict[int, int] = {}
    begun: list[int] = []
    for step in iter_warm_up_steps(
        LENGTHS, block_size, num_blocks, max_model_len, max_batched_tokens
    ):
        assert step.num_tokens <= max_batched_tokens
        blocks = [block for slice_ in step.slices for block in slice_.block_table]
        assert all(
            0 <= block < num_blocks
            for block in (*blocks, *(place for pair in step.block_copies for place in pair))
        )
        for slice_ in step.slices:
            end = slice_.start + len(slice_.token_ids)
            assert 0 <= slice_.start <= computed.get(slice_.sequence_id, 0), (
                "nothing that was not computed is read"
            )
            assert end <= min(max_model_len, len(slice_.block_table) * block_size)
            assert slice_.sample_spec is not None
            assert slice_.sample_spec.position == end
            computed[slice_.sequence_id] = end
            begun += [end] if slice_.sequence_id == 0 and slice_.start == 0 else []
        held = [set(slice_.block_table) for slice_ in step.slices]
        assert sum(map(len, held)) == len(set().union(*held)), "no two write to one block"
    assert begun == prompts


def test_a_mixed_warm_up_has_a_prompt_and_a_decode_slice() -> None:
    step, copy = list_mixed_warm_up_steps(block_size=4, num_blocks=2, max_model_len=4)
    assert [len(slice_.token_ids) for slice_ in step.slices] == [1, 4]
    assert [slice_.block_table for slice_ in step.slices] == [[0], [1]]
    specs = [slice_.sample_spec for slice_ in step.slices]
    assert [spec.params.temperature for spec in specs if spec] == [0.0, 1.0]
    assert copy.block_copies == ((0, 1),)


@pytest.mark.parametrize("limits", [(3, 2, 4), (4, 1, 4), (4, 2, 3)])
def test_a_mixed_warm_up_that_does_not_fit_is_left_out(limits: tuple[int, int, int]) -> None:
    assert list_mixed_warm_up_steps(*limits) == []


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_warm_up_changes_no_answer(tmp_path: Path, num_blocks: int) -> None:
    folder = build_model("mixed", tmp_path)
    tokens = tuple(range(3, 16))
    spec = SampleSpec(SamplingParams(1, temperature=0.0, logprobs=3), 0, len(tokens))
    step = StepBatch((SequenceSlice(SequenceId(1), tokens, 0, [BlockIndex(0)], spec),))
    answers = []
    for warm in (False, True):
        engine = load_model_engine(folder, dtype="float32")
        memory = bytearray(num_blocks * engine.layout.block_bytes)
        engine.bind_cache(memoryview(memory), num_blocks)
        if warm:
            engine.warm_up(512)
            assert any(memory), "it did compute"
        answers.append(engine.run(step))
    assert answers[0] == answers[1]


def test_warm_up_stops_when_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_model_engine(build_model("llama", tmp_path), dtype="float32")
    engine.bind_cache(memoryview(bytearray(4 * engine.layout.block_bytes)), 4)
    ran: list[StepBatch] = []
    monkeypatch.setattr(engine, "run", ran.append)
    engine.warm_up(64, lambda: len(ran) < 2)
    assert len(ran) == 2
