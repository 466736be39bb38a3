"""How long decode steps take, by how much they do: what the coordinator's cost model learns
from."""

from typing import NamedTuple

from node_engine.core.step.step_batch import StepBatch


class DecodeStepTotals(NamedTuple):
    """Of all steps so far in which every sequence took one token. `context_tokens`: in the caches
    that they read."""

    num_steps: int = 0
    seconds: float = 0.0
    num_sequences: int = 0
    context_tokens: int = 0

    def with_step(self, batch: StepBatch, seconds: float) -> "DecodeStepTotals":
        """With one more step, if it is one of those."""
        if any(len(piece.token_ids) != 1 for piece in batch.slices):
            return self
        return DecodeStepTotals(
            self.num_steps + 1,
            self.seconds + seconds,
            self.num_sequences + len(batch.slices),
            self.context_tokens + sum(piece.start + 1 for piece in batch.slices),
        )
