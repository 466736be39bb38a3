"""Predicts the next decode step, so that it is launched before the host has read this one.

While the GPU computes a step, the host would read its tokens, report them, schedule and launch: the
GPU would wait for all of that. Instead, the step that follows if no sequence ends is launched at
once, with the sampled tokens still on the device. When the scheduler asks for it, it has been
running meanwhile. Rows of sequences that have ended are discarded. Slices that are new are deferred
to the step after, which is launched with them.

A predicted step is safe to discard: it writes one position of blocks that its sequences owned when
it was launched, and later launches of the stream overwrite what it wrote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.sampling.sampler import needs_extra_steps


def is_decode_slice(slice_: SequenceSlice) -> bool:
    """Whether the slice is one token whose successor is sampled."""
    return (
        len(slice_.token_ids) == 1
        and slice_.sample_spec is not None
        and slice_.logprobs_spec is None
    )


def encode_source_row(row: int) -> int:
    """The token of a predicted slice whose token is sampled in `row` of the step before."""
    return -1 - row


@dataclass(frozen=True, slots=True)
class _PredictedRow:
    """One slice as the next step has it if its sequence goes on."""

    row: int  # of the predicted step
    slice: SequenceSlice

    def is_row_of(self, slice_: SequenceSlice, previous_tokens: Sequence[int]) -> bool:
        """Whether this row computes `slice_`; `previous_tokens` are those of the step before."""
        token, spec, asked = self.slice.token_ids[0], self.slice.sample_spec, slice_.sample_spec
        if spec is None or asked is None or not is_decode_slice(slice_) or needs_extra_steps(asked):
            return False
        expected = token if token >= 0 else previous_tokens[-1 - token]
        blocks = self.slice.block_table
        return (
            slice_.token_ids[0] == expected
            and slice_.start == self.slice.start
            and asked.params is spec.params
            and asked.choice_index == spec.choice_index
            and asked.position == spec.position
            and list(slice_.block_table[: len(blocks)]) == blocks
        )


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The decode step that follows another one if no sequence ends."""

    batch: StepBatch  # one slice per row; see encode_source_row for its tokens
    rows: Mapping[SequenceId, _PredictedRow]

    @staticmethod
    def predict(
        slices: Sequence[SequenceSlice], launched_rows: Sequence[int | None], block_size: int
    ) -> "StepPrediction | None":
        """Predict what follows the launched step.

        `launched_rows` has the row that computes each slice, or None for a new slice, which is then
        computed in the predicted step. Returns None if nothing can be predicted: a row needs the
        host for its sampling, there is a prefill chunk, or all sequences end.
        """
        rows: dict[SequenceId, _PredictedRow] = {}
        for slice_, row in zip(slices, launched_rows, strict=True):
            spec = slice_.sample_spec
            if not is_decode_slice(slice_) or spec is None or needs_extra_steps(spec):
                return None
            following = slice_ if row is None else _continue_slice(slice_, spec, row)
            num_blocks = following.start // block_size + 1
            if (row is None or spec.may_continue) and num_blocks <= len(slice_.block_table):
                blocks = list(slice_.block_table[:num_blocks])
                rows[slice_.sequence_id] = _PredictedRow(
                    len(rows), replace(following, block_table=blocks)
                )
        batch = StepBatch(tuple(predicted.slice for predicted in rows.values()))
        return StepPrediction(batch, rows) if rows else None

    def find_rows(
        self, slices: Sequence[SequenceSlice], previous_tokens: Sequence[int]
    ) -> dict[int, int]:
        """The row that computes each slice, by its index; slices without a row are left out.

        `previous_tokens`: what the step before has sampled, by row.
        """
        found = {}
        for index, slice_ in enumerate(slices):
            predicted = self.rows.get(slice_.sequence_id)
            if predicted is not None and predicted.is_row_of(slice_, previous_tokens):
                found[index] = predicted.row
        return found


def _continue_slice(slice_: SequenceSlice, spec: SampleSpec, row: int) -> SequenceSlice:
    return replace(
        slice_,
        token_ids=(encode_source_row(row),),
        start=slice_.start + 1,
        sample_spec=SampleSpec(spec.params, spec.choice_index, spec.position + 1),
    )
