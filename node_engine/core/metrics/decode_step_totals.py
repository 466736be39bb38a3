"""Totals over decode steps, from which the coordinator's cost model learns."""

from typing import NamedTuple

from node_engine.core.step.step_batch import StepBatch


class DecodeStepTotals(NamedTuple):
    """Totals over all steps so far in which every sequence computed exactly one token."""

    num_steps: int = 0
    seconds: float = 0.0
    num_sequences: int = 0  # summed over steps
    context_tokens: int = 0  # tokens of KV that the steps read

    def with_step(self, batch: StepBatch, seconds: float) -> "DecodeStepTotals":
        """These totals plus one more step; unchanged if the step computed prompts."""
        if any(len(slice_.token_ids) != 1 for slice_ in batch.slices):
            return self
        return DecodeStepTotals(
            self.num_steps + 1,
            self.seconds + seconds,
            self.num_sequences + len(batch.slices),
            self.context_tokens + sum(slice_.start + 1 for slice_ in batch.slices),
        )
