"""Totals over decode steps, from which the coordinator's cost model learns."""

from typing import NamedTuple

from node_engine.core.step.step_batch import StepBatch


class DecodeStepTotals(NamedTuple):
    """Totals over all steps so far that computed no prompt: every sequence got a token.

    With accepted drafts it got more. Such a step counts as one whose sequences got one token each,
    and as many seconds as that took.
    """

    num_steps: int = 0
    seconds: float = 0.0
    num_sequences: int = 0  # summed over steps
    context_tokens: int = 0  # tokens of KV that the steps read

    def with_step(
        self, batch: StepBatch, seconds: float, num_accepted_drafts: int = 0
    ) -> "DecodeStepTotals":
        """These totals plus one more step; unchanged if the step computed prompts."""
        count = len(batch.slices)
        if any(len(slice_.token_ids) - len(slice_.draft_specs) != 1 for slice_ in batch.slices):
            return self
        return DecodeStepTotals(
            self.num_steps + 1,
            self.seconds + seconds * count / (count + num_accepted_drafts),
            self.num_sequences + count,
            self.context_tokens + sum(slice_.start + 1 for slice_ in batch.slices),
        )
