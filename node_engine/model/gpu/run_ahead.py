"""Predicts the next step, so that it is launched before the host has read this one.

While the GPU computes a step, the host would read its tokens, report them, schedule and launch: the
GPU would wait for all of that. Instead, the step that follows if no sequence ends is launched at
once, with the sampled tokens still on the device. When the scheduler asks for it, it has been
running meanwhile. Rows of sequences that have ended are discarded. Slices that are new, whole
prompts or decode slices, are deferred to the step after, which is launched with them.

A predicted step is safe to discard: it writes behind the contexts of its sequences, in blocks that
they owned when it was launched, and later launches of the stream overwrite what it wrote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.gpu.step_inputs import encode_source_row
from node_engine.model.sampling.sampler import needs_extra_steps


def is_decode_slice(slice_: SequenceSlice) -> bool:
    """Whether the slice is one token whose successor is sampled."""
    return (
        len(slice_.token_ids) == 1
        and slice_.sample_spec is not None
        and slice_.logprobs_spec is None
    )


def can_be_predicted(slice_: SequenceSlice) -> bool:
    """Whether the device alone can compute a slice, and what follows it.

    The last chunk of a prompt ends with a draw. What follows another chunk depends on how many
    tokens the scheduler has for it; penalties, bias and logprobs need the host.
    """
    spec = slice_.sample_spec
    return spec is not None and slice_.logprobs_spec is None and not needs_extra_steps(spec)


@dataclass(frozen=True, slots=True)
class _PredictedSlice:
    """One slice as the next step has it if its sequence goes on."""

    place: int  # in the predicted batch
    slice: SequenceSlice

    def equals(self, slice_: SequenceSlice, previous_tokens: Sequence[int]) -> bool:
        """Whether it computes `slice_`; `previous_tokens` were drawn by the step before."""
        spec, asked = self.slice.sample_spec, slice_.sample_spec
        if spec is None or asked is None or not can_be_predicted(slice_):
            return False
        tokens = self.slice.token_ids
        if tokens[0] < 0:
            tokens = (previous_tokens[-1 - tokens[0]],)
        blocks = self.slice.block_table
        return (
            slice_.token_ids == tokens
            and slice_.start == self.slice.start
            and asked.params is spec.params
            and asked.choice_index == spec.choice_index
            and asked.position == spec.position
            and list(slice_.block_table[: len(blocks)]) == blocks
        )


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The step that follows another one if no sequence ends."""

    batch: StepBatch  # see encode_source_row for its tokens
    slices: Mapping[SequenceId, _PredictedSlice]

    @staticmethod
    def predict(
        slices: Sequence[SequenceSlice],
        draw_by_slice: Mapping[int, int],
        block_size: int,
        max_model_len: int,
    ) -> "StepPrediction | None":
        """Predict what follows the launched step.

        `draw_by_slice` has the draw of the launched step for the index of each slice. Other slices
        are new, and part of the predicted step. Returns None if nothing can be predicted: a slice
        needs the host, or all sequences end.
        """
        if not all(map(can_be_predicted, slices)):
            return None
        predicted: dict[SequenceId, _PredictedSlice] = {}
        for index, slice_ in enumerate(slices):
            following, spec = slice_, slice_.sample_spec
            if spec is not None and index in draw_by_slice:
                if not spec.may_continue:
                    continue
                following = _continue_slice(slice_, spec, draw_by_slice[index])
            length = following.start + len(following.token_ids)
            num_blocks = -(-length // block_size)
            if length <= max_model_len and num_blocks <= len(slice_.block_table):
                blocks = list(slice_.block_table[:num_blocks])
                following = replace(following, block_table=blocks)
                predicted[slice_.sequence_id] = _PredictedSlice(len(predicted), following)
        batch = StepBatch(tuple(found.slice for found in predicted.values()))
        return StepPrediction(batch, predicted) if predicted else None

    def find_places(
        self, slices: Sequence[SequenceSlice], previous_tokens: Sequence[int]
    ) -> dict[int, int]:
        """The place of each slice in the predicted batch, by its index, if it has one.

        `previous_tokens`: what the step before has drawn.
        """
        found = {}
        for index, slice_ in enumerate(slices):
            predicted = self.slices.get(slice_.sequence_id)
            if predicted is not None and predicted.equals(slice_, previous_tokens):
                found[index] = predicted.place
        return found


def _continue_slice(slice_: SequenceSlice, spec: SampleSpec, draw: int) -> SequenceSlice:
    return replace(
        slice_,
        token_ids=(encode_source_row(draw),),
        start=slice_.start + len(slice_.token_ids),
        sample_spec=SampleSpec(spec.params, spec.choice_index, spec.position + 1),
    )
