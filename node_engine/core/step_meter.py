"""How long decode steps take, by how much they do: what the coordinator's cost model learns from."""

from typing import NamedTuple

from node_engine.core.step import StepBatch


class StepTotals(NamedTuple):
    """Of all steps so far in which every sequence took one token. `tokens`: in the caches that they read."""

    steps: int = 0
    seconds: float = 0.0
    sequences: int = 0
    tokens: int = 0

    def plus(self, batch: StepBatch, seconds: float) -> "StepTotals":
        """With one more step, if it is one of those."""
        if any(len(piece.tokens) != 1 for piece in batch.slices):
            return self
        return StepTotals(
            self.steps + 1,
            self.seconds + seconds,
            self.sequences + len(batch.slices),
            self.tokens + sum(piece.start + 1 for piece in batch.slices),
        )
