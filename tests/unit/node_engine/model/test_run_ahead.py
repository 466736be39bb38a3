"""Predicted steps: what is launched ahead, and which slices of the next step it computes."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
)
from node_engine.model.gpu.run_ahead import StepPrediction
from node_engine.model.gpu.step_inputs import encode_source_row

BLOCK = 4
LONGEST = 100  # positions
PARAMS = SamplingParams(max_tokens=10, temperature=0.0)


class _UncomputedMask:
    def wait_for_words(self) -> npt.NDArray[np.int32]:
        raise AssertionError("nobody draws here")


MASK = _UncomputedMask()


def decode_slice(sequence: int, start: int, token: int = 7, **spec: object) -> SequenceSlice:
    """A decode slice whose block table has room for one position more."""
    blocks = [BlockIndex(100 * sequence + number) for number in range((start + 1) // BLOCK + 1)]
    sample = SampleSpec(PARAMS, 0, start + 1, **spec)  # type: ignore[arg-type]
    return SequenceSlice(SequenceId(sequence), (token,), start, blocks, sample)


def next_slice(slice_: SequenceSlice, token: int) -> SequenceSlice:
    """What the scheduler asks for when `token` was sampled."""
    assert slice_.sample_spec is not None
    return replace(
        slice_,
        token_ids=(token,),
        start=slice_.start + 1,
        sample_spec=SampleSpec(PARAMS, 0, slice_.start + 2),
    )


def predict(*slices: SequenceSlice) -> StepPrediction:
    prediction = StepPrediction.predict(slices, dict(enumerate(range(len(slices)))), BLOCK, LONGEST)
    assert prediction is not None
    return prediction


def test_each_sequence_goes_on_with_the_token_of_its_row() -> None:
    first, second = decode_slice(1, 3), decode_slice(2, 9)
    prediction = predict(first, second)
    assert [slice_.token_ids for slice_ in prediction.batch.slices] == [
        (encode_source_row(0),),
        (encode_source_row(1),),
    ]
    assert [slice_.start for slice_ in prediction.batch.slices] == [4, 10]
    asked = [next_slice(second, 60), next_slice(first, 50)]
    assert prediction.find_places(asked, [50, 60]) == {0: 1, 1: 0}


def test_rows_of_ended_sequences_are_left_over() -> None:
    first, second = decode_slice(1, 3), decode_slice(2, 9)
    assert predict(first, second).find_places([next_slice(second, 60)], [50, 60]) == {0: 1}


def test_a_new_slice_has_no_row_and_is_part_of_the_next_prediction() -> None:
    old, new = decode_slice(1, 3), decode_slice(2, 9, token=42)
    prediction = predict(old)
    asked = [next_slice(old, 50), new]
    draws = prediction.find_places(asked, [50])
    assert draws == {0: 0}
    following = StepPrediction.predict(asked, draws, BLOCK, LONGEST)
    assert following is not None
    assert [slice_.token_ids for slice_ in following.batch.slices] == [
        (encode_source_row(0),),
        (42,),
    ]
    again = [next_slice(asked[0], 51), new]
    assert following.find_places(again, [51]) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (51,)},
        {"start": 5},
        {"block_table": [BlockIndex(100), BlockIndex(999)]},
        {"sample_spec": None},
        {"sample_spec": SampleSpec(replace(PARAMS, temperature=1.0), 0, 5)},
        {"sample_spec": SampleSpec(PARAMS, 1, 5)},
        {"sample_spec": SampleSpec(PARAMS, 0, 6)},
        {"sample_spec": SampleSpec(PARAMS, 0, 5, forbidden_token_ids=(2,))},
        {"sample_spec": SampleSpec(PARAMS, 0, 5, mask=MASK)},
        {"token_ids": (50, 50)},
        {"logprobs_spec": PromptLogprobsSpec((1,), 0)},
    ],
)
def test_a_slice_that_differs_has_no_row(change: dict[str, object]) -> None:
    slice_ = decode_slice(1, 3)
    asked = next_slice(slice_, 50)
    assert predict(slice_).find_places([asked], [50]) == {0: 0}
    changed = replace(asked, **change)  # type: ignore[arg-type]
    assert predict(slice_).find_places([changed], [50]) == {}


def test_blocks_may_be_added_but_not_replaced() -> None:
    slice_ = decode_slice(1, 3)
    prediction = predict(slice_)
    asked = next_slice(slice_, 50)
    assert isinstance(slice_.block_table, list)
    slice_.block_table.append(BlockIndex(777))  # the scheduler's list grows
    assert prediction.find_places([asked], [50]) == {0: 0}
    slice_.block_table[0] = BlockIndex(778)
    assert prediction.find_places([asked], [50]) == {}


def test_sequences_that_end_or_lack_a_block_are_not_predicted() -> None:
    ending, going = decode_slice(1, 3, may_continue=False), decode_slice(2, 9)
    full = replace(decode_slice(3, 3), block_table=[BlockIndex(300)])
    prediction = predict(ending, full, going)
    assert set(prediction.slices) == {SequenceId(2)}
    assert prediction.batch.slices[0].token_ids == (encode_source_row(2),)
    assert StepPrediction.predict([ending, full], {0: 0, 1: 1}, BLOCK, LONGEST) is None


def prompt_slice(sequence: int, tokens: tuple[int, ...]) -> SequenceSlice:
    """A whole prompt, whose block table has room for one position more."""
    slice_ = decode_slice(sequence, len(tokens) - 1)
    return replace(slice_, token_ids=tokens, start=0)


def test_a_prompt_goes_on_behind_its_last_token() -> None:
    prompt, old = prompt_slice(1, (1, 2, 3, 4, 5)), decode_slice(2, 9)
    prediction = StepPrediction.predict([prompt, old], {0: 1, 1: 0}, BLOCK, LONGEST)
    assert prediction is not None
    following = prediction.batch.slices[0]
    assert (following.token_ids, following.start) == ((encode_source_row(1),), 5)
    asked = replace(decode_slice(1, 5, token=60), block_table=prompt.block_table)
    assert prediction.find_places([asked, next_slice(old, 50)], [50, 60]) == {0: 0, 1: 1}


def test_a_new_prompt_is_part_of_the_prediction() -> None:
    old, prompt = decode_slice(1, 3), prompt_slice(2, (1, 2, 3))
    prediction = StepPrediction.predict([old, prompt], {0: 0}, BLOCK, LONGEST)
    assert prediction is not None
    assert prediction.batch.slices[1].token_ids == (1, 2, 3)
    assert prediction.find_places([next_slice(old, 50), prompt], [50]) == {0: 0, 1: 1}
    shorter = replace(prompt, token_ids=(1, 2))
    assert prediction.find_places([shorter], [50]) == {}


def test_steps_that_need_the_host_are_not_predicted() -> None:
    chunk = replace(decode_slice(2, 8), token_ids=(1, 2), sample_spec=None)
    special = decode_slice(3, 5, forbidden_token_ids=(2,))
    masked = decode_slice(4, 5, mask=MASK)
    for other in (chunk, special, masked):
        for draws in ({0: 0, 1: 1}, {0: 0}):
            slices = [decode_slice(1, 3), other]
            assert StepPrediction.predict(slices, draws, BLOCK, LONGEST) is None


def test_nothing_is_predicted_behind_the_longest_context() -> None:
    slice_ = decode_slice(1, 8)
    assert StepPrediction.predict([slice_], {0: 0}, BLOCK, 10) is not None
    assert StepPrediction.predict([slice_], {0: 0}, BLOCK, 9) is None
