"""The packed inputs of a step on a GPU: every part, unpacked as kernels read it."""

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)

pytest.importorskip("triton")

from kv_kernels.triton.prefill_attention import QUERY_TILE
from kv_kernels.triton.sampling import SamplingRows
from node_engine.model.gpu import step_inputs
from node_engine.model.gpu.decode_graphs import decode_shape, list_buckets
from node_engine.model.gpu.fused_transformer import choose_splits
from node_engine.model.gpu.step_inputs import (
    BlockTableCache,
    DeviceInputs,
    ScoredRows,
    StepInputs,
    StepInputsBuilder,
    StepShape,
)

BLOCK_SIZE = 4
SCRATCH_BLOCK = 50
GREEDY = SamplingParams(1, temperature=0.0)


@pytest.fixture
def builder() -> StepInputsBuilder:
    return StepInputsBuilder(BLOCK_SIZE, SCRATCH_BLOCK)


def make_slice(
    number: int,
    tokens: Sequence[int],
    start: int,
    table: Sequence[int],
    *,
    sampled: bool = True,
    params: SamplingParams = GREEDY,
    scored: PromptLogprobsSpec | None = None,
) -> SequenceSlice:
    spec = SampleSpec(params, number % 3, start + len(tokens)) if sampled else None
    blocks = [BlockIndex(block) for block in table]
    return SequenceSlice(SequenceId(number), tuple(tokens), start, blocks, spec, scored)


def unpack(inputs: StepInputs) -> DeviceInputs:
    return DeviceInputs.unpack(torch.from_numpy(inputs.words), inputs.shape)


def list_tensors(parts: DeviceInputs | SamplingRows) -> list[torch.Tensor]:
    values = (getattr(parts, each.name) for each in dataclasses.fields(parts))
    return [value for value in values if isinstance(value, torch.Tensor)]


def read_table(parts: DeviceInputs, start: torch.Tensor, blocks: int) -> list[int]:
    entries: list[int] = parts.tables[int(start) :][:blocks].tolist()
    return entries


DECODE = (make_slice(1, [7], 5, [3, 1, 8]), make_slice(2, [9], 0, [2]))


def test_decode_slices_have_one_row_each(builder: StepInputsBuilder) -> None:
    inputs = builder.build_inputs(StepBatch(DECODE))
    parts = unpack(inputs)
    assert inputs.shape == decode_shape(2)
    assert inputs.is_decode_only
    assert parts.token_ids.tolist() == [7, 9]
    assert parts.positions.tolist() == [5, 0]
    assert parts.slots.tolist() == [1 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE]
    assert parts.decode_lengths.tolist() == parts.sampled_lengths.tolist() == [6, 1]
    assert parts.decode_starts.tolist() == parts.sampled_starts.tolist()
    assert read_table(parts, parts.decode_starts[0], 2) == [3, 1]
    assert read_table(parts, parts.decode_starts[1], 1) == [2]
    assert len(parts.tables) == 3, "blocks behind the slice are not packed"
    assert parts.sampled_rows.tolist() == parts.drawn_rows.tolist() == [0, 1]
    assert inputs.drawn_slice_indices == (0, 1)
    assert inputs.sample_specs == tuple(slice_.sample_spec for slice_ in DECODE)
    assert not inputs.scored_rows
    assert parts.tiles.shape == (0, 4)


def test_padding_rows_attend_to_nothing_and_write_to_the_scratch_block(
    builder: StepInputsBuilder,
) -> None:
    exact = builder.build_inputs(StepBatch(DECODE))
    inputs = builder.build_inputs(StepBatch(DECODE), decode_rows=4)
    parts = unpack(inputs)
    assert inputs.shape == decode_shape(4)
    assert len(inputs.words) == decode_shape(4).num_words + 3
    assert inputs.sample_specs == exact.sample_specs
    scratch = SCRATCH_BLOCK * BLOCK_SIZE
    assert parts.slots.tolist() == [*unpack(exact).slots.tolist(), scratch, scratch]
    assert parts.decode_lengths.tolist() == [6, 1, 0, 0]
    assert parts.token_ids.tolist() == [7, 9, 0, 0]
    assert parts.positions.tolist() == [5, 0, 0, 0]
    assert parts.sampling.temperature.tolist() == [0.0] * 4
    assert read_table(parts, parts.decode_starts[0], 2) == [3, 1]
    assert read_table(parts, parts.decode_starts[1], 1) == [2]


def test_mixed_step_has_decode_rows_before_chunks(builder: StepInputsBuilder) -> None:
    chunk = list(range(100, 100 + QUERY_TILE + 2))
    table = list(range(10, 10 + 35))
    batch = StepBatch(
        (
            make_slice(1, chunk, 6, table, sampled=False),
            make_slice(2, [9], 4, [2, 6]),
            make_slice(3, [5, 6, 7], 0, [4]),
            make_slice(4, [8], 0, [1], sampled=False),
        )
    )
    inputs = builder.build_inputs(batch)
    parts = unpack(inputs)
    rows = 2 + len(chunk) + 3
    assert inputs.shape == StepShape(rows, decode_rows=2, sampled_rows=2, draws=2, tiles=3)
    assert not inputs.is_decode_only
    assert parts.token_ids.tolist() == [9, 8, *chunk, 5, 6, 7]
    positions = [4, 0, *range(6, 6 + len(chunk)), 0, 1, 2]
    assert parts.positions.tolist() == positions
    owners = [[2, 6], [1], *[table] * len(chunk), *[[4]] * 3]
    assert parts.slots.tolist() == [
        owner[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for owner, position in zip(owners, positions, strict=True)
    ]
    assert parts.decode_lengths.tolist() == [5, 1]
    assert parts.sampled_rows.tolist() == [0, rows - 1]
    assert parts.drawn_rows.tolist() == [0, 1]
    assert inputs.drawn_slice_indices == (1, 2)
    assert parts.sampled_lengths.tolist() == [5, 3]
    assert read_table(parts, parts.sampled_starts[0], 2) == [2, 6]
    assert read_table(parts, parts.sampled_starts[1], 1) == [4]
    tiles = sorted([*tile[1:], tile[0]] for tile in parts.tiles.tolist())
    assert [tile[:3] for tile in tiles] == [
        [2, 6, QUERY_TILE],
        [2 + QUERY_TILE, 6 + QUERY_TILE, 2],
        [2 + len(chunk), 0, 3],
    ]
    for tile, blocks in zip(tiles, (table[:34], table[:34], [4]), strict=True):
        assert read_table(parts, torch.tensor(tile[3]), len(blocks)) == blocks


@pytest.mark.parametrize("others", range(5))
def test_every_part_is_aligned(builder: StepInputsBuilder, others: int) -> None:
    chunk = make_slice(9, [5, 6, 7], 0, [4])
    decode = [make_slice(place, [3], 0, [place]) for place in range(others)]
    parts = unpack(builder.build_inputs(StepBatch((chunk, *decode))))
    base = parts.sampling.seed.data_ptr()  # the first part
    tensors = [*list_tensors(parts.sampling), *list_tensors(parts)]
    assert len(tensors) > 15
    assert {(tensor.data_ptr() - base) % 16 for tensor in tensors if len(tensor)} == {0}


def test_every_row_is_computed_to_the_end_to_score_a_prompt(builder: StepInputsBuilder) -> None:
    scores = PromptLogprobsSpec((6, 7), 3)
    one = PromptLogprobsSpec((4,), 0)
    batch = StepBatch(
        (
            make_slice(1, [5, 6, 7], 4, [3, 8], scored=scores),
            make_slice(2, [9], 0, [2]),
            make_slice(3, [3], 0, [1], sampled=False, scored=one),
            make_slice(4, [1, 2], 0, [4], sampled=False),
        )
    )
    inputs = builder.build_inputs(batch)
    parts = unpack(inputs)
    assert inputs.shape == StepShape(7, decode_rows=2, sampled_rows=7, draws=2, tiles=2)
    assert parts.sampled_rows.tolist() == list(range(7))
    assert parts.drawn_rows.tolist() == [0, 4]
    assert inputs.drawn_slice_indices == (1, 0)
    assert inputs.scored_rows == (ScoredRows(1, one, 2), ScoredRows(2, scores, 0))


def test_a_scored_token_is_no_decode_step(builder: StepInputsBuilder) -> None:
    scored = make_slice(1, [3], 0, [1], scored=PromptLogprobsSpec((4,), 0))
    assert not builder.build_inputs(StepBatch((scored,))).is_decode_only


def test_an_unsampled_token_is_no_decode_step(builder: StepInputsBuilder) -> None:
    batch = StepBatch((*DECODE, make_slice(3, [3], 0, [1], sampled=False)))
    assert not builder.build_inputs(batch).is_decode_only


def test_a_step_without_samples_draws_nothing(builder: StepInputsBuilder) -> None:
    batch = StepBatch((make_slice(3, [3, 4], 0, [1], sampled=False),))
    inputs = builder.build_inputs(batch)
    assert inputs.shape == StepShape(2, decode_rows=0, sampled_rows=0, draws=0, tiles=1)
    assert inputs.sample_specs == ()


def test_sampling_parameters_keep_their_bits(builder: StepInputsBuilder) -> None:
    params = (
        SamplingParams(1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=2**64 - 1),
        SamplingParams(1, temperature=1.3, seed=2**63 + 12345),
        SamplingParams(1, temperature=0.0, seed=3),
    )
    slices = [make_slice(n, [n], 8 + n, [1, 2, 3], params=each) for n, each in enumerate(params)]
    rows = unpack(builder.build_inputs(StepBatch(tuple(slices)))).sampling
    assert rows.temperature.tolist() == pytest.approx([0.7, 1.3, 0.0])
    assert rows.top_p.tolist() == pytest.approx([0.9, 1.0, 1.0])
    assert rows.log_min_p.tolist() == pytest.approx([math.log(0.05), -math.inf, -math.inf])
    assert rows.top_k.tolist() == [5, 0, 0]
    assert rows.seed.numpy().view(np.uint64).tolist() == [each.seed for each in params]
    assert rows.position.tolist() == [9, 10, 11]
    assert rows.choice.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "start", "blocks"), [((), 0, 1), ((1,) * 5, 0, 1), ((1,), 4, 1), ((1,), 0, 0)]
)
def test_a_slice_that_its_blocks_cannot_hold_is_refused(
    builder: StepInputsBuilder, tokens: tuple[int, ...], start: int, blocks: int
) -> None:
    batch = StepBatch((*DECODE, make_slice(3, tokens, start, range(blocks))))
    with pytest.raises(ValueError, match=f"sequence 3: {len(tokens)} tokens from position {start}"):
        builder.build_inputs(batch)


def test_cached_tables_follow_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables grow, shrink, get other blocks and come back, also after they were forgotten."""
    monkeypatch.setattr(step_inputs, "_MAX_CACHED_TABLES", 0)
    dice = random.Random(0)
    tables = BlockTableCache()
    blocks: dict[int, list[int]] = {number: [] for number in range(7)}
    for _ in range(2000):
        number = dice.randrange(len(blocks))
        table = blocks[number]
        change = dice.randrange(4)
        if change == 0 or not table:
            table += [dice.randrange(99) for _ in range(dice.choice((1, 2, 100)))]
        elif change == 1:
            table[dice.randrange(len(table))] = dice.randrange(99)
        elif change == 2:
            del table[dice.randrange(1, len(table) + 1) :]
        count = dice.randint(1, len(table))
        slice_ = make_slice(number, [1], 0, table)
        if dice.random() < 0.2:
            tables.drop_unused_tables([slice_])
        found = tables.get_table(slice_, count)
        assert found.dtype == np.int32
        assert found.tolist() == table[:count]


def test_tables_of_different_sequences_do_not_share_memory() -> None:
    tables = BlockTableCache()
    first = tables.get_table(make_slice(1, [1], 0, [1, 2, 3]), 3)
    second = tables.get_table(make_slice(2, [1], 0, [4, 5]), 2)
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize(
    ("max_rows", "buckets"),
    [
        (1, [1]),
        (6, [1, 2, 4, 6]),
        (16, [1, 2, 4, 8, 16]),
        (100, [1, 2, 4, *range(8, 64, 8), 64, 96, 100]),
        (256, [1, 2, 4, *range(8, 64, 8), *range(64, 257, 32)]),
        (
            5000,
            [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 1025, 64)],
        ),
    ],
)
def test_buckets_end_with_the_largest_batch(max_rows: int, buckets: list[int]) -> None:
    assert list_buckets(max_rows) == buckets


@pytest.mark.parametrize(
    ("rows", "kv_heads", "splits"),
    [
        (1, 8, 32),
        (2, 8, 32),
        (4, 8, 16),
        (32, 8, 2),
        (64, 8, 1),
        (3, 8, 16),
        (256, 8, 1),
        (0, 8, 32),
    ],
)
def test_few_sequences_are_split_among_many_programs(rows: int, kv_heads: int, splits: int) -> None:
    assert choose_splits(rows, kv_heads) == splits
