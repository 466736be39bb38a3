"""The bounds of what a node computes, and what it answers about its room."""

from dataclasses import dataclass

from baton.errors import ConfigError
from node_engine.core.sequences.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of what a node computes."""

    max_num_seqs: int  # sequences that compute or await KV
    max_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of prompt and output together
    lookahead_tokens: int = 0  # for which a running sequence gets blocks ahead, if any are free
    max_draft_tokens: int = 0  # of a sequence in a step; 0: no speculative decoding

    def check(self, block_size: int) -> None:
        """Raise ConfigError unless each sequence decodes in a step and one block is computed."""
        least = self.max_num_seqs - 1 + block_size
        if self.max_num_seqs < 1 or self.max_batched_tokens < least:
            raise ConfigError(
                f"max_batched_tokens is {self.max_batched_tokens}, but max_num_seqs"
                f" {self.max_num_seqs} with block_size {block_size} needs {least}:"
                " raise --max-batched-tokens or lower --max-num-seqs"
            )


@dataclass(frozen=True, slots=True)
class CapacityRefusal:
    """Why a sequence cannot be admitted now; nothing was reserved for it."""

    needed_blocks: int
    free_blocks: int
    free_slots: int  # room for sequences that compute


@dataclass(frozen=True, slots=True)
class AdmissionEstimate:
    """What it would take to serve a context on this node."""

    num_missing_tokens: int  # to be computed or received, at least one
    refusal: CapacityRefusal | None  # why this node cannot compute them now; None if it can


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """The load of a node."""

    num_sequences_by_state: dict[SequenceState, int]
    queued_tokens: int  # context tokens that are still to be computed here
