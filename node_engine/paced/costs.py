"""How long a step of the paced engine takes."""

from dataclasses import dataclass

from node_engine.core.step.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class PacedCosts:
    """Duration of a step, in microseconds.

    A slice of one sampled token, drafts aside, counts as decode, and any other as prefill. A draft
    costs what a prompt token does. *Context* and *cached*
    tokens are those before the slice, whose KV is in the arena.
    """

    step_base_us: float = 0.0
    prefill_us_per_token: float = 20.0
    prefill_us_per_cached_token: float = 0.01
    decode_base_us: float = 2000.0  # once per step that decodes
    decode_us_per_sequence: float = 20.0
    decode_us_per_context_token: float = 0.05

    def compute_step_seconds(self, batch: StepBatch) -> float:
        """Seconds that a step takes."""
        micros, decoding = self.step_base_us, False
        for slice_ in batch.slices:
            drafts = len(slice_.draft_specs)
            if len(slice_.token_ids) - drafts == 1 and slice_.sample_spec is not None:
                decoding = True
                micros += (
                    self.decode_us_per_sequence
                    + self.decode_us_per_context_token * slice_.start
                    + self.prefill_us_per_token * drafts
                )
            else:
                micros += (
                    self.prefill_us_per_token * len(slice_.token_ids)
                    + self.prefill_us_per_cached_token * slice_.start
                )
        return (micros + (self.decode_base_us if decoding else 0.0)) * 1e-6


ZERO_COSTS = PacedCosts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
