"""The limits of a node, and how much room its sequences leave: slots to compute, blocks for KV."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from baton.errors import ConfigError, ContextLengthExceeded, OutOfBlocks
from baton.types import AttemptKey
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.sequences.sequence import Sequence, SequenceState, SequenceTable

WAITING, PREFILLING = SequenceState.WAITING, SequenceState.PREFILLING
RUNNING, AWAITING_KV = SequenceState.RUNNING, SequenceState.AWAITING_KV


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of what a node computes."""

    max_num_seqs: int  # sequences that compute or await KV
    max_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of prompt and output together

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


class NodeCapacity:
    """What the sequences of a node leave of its slots and blocks. It changes nothing.

    WAITING sequences that are entitled to room (local or ticketed prefills) have a claim on it.
    """

    def __init__(self, pool: BlockPool, sequences: SequenceTable, limits: SchedulerLimits) -> None:
        self._block_pool = pool
        self._sequences = sequences
        self._limits = limits

    @property
    def free_slots(self) -> int:
        """How many more sequences may compute or await KV."""
        taken = sum(
            len(self._sequences.get_by_state(state)) for state in (PREFILLING, RUNNING, AWAITING_KV)
        )
        return max(0, self._limits.max_num_seqs - taken)

    @property
    def free_blocks(self) -> int:
        """Blocks for new work; one per running sequence is kept back, so that it can grow."""
        running = len(self._sequences.get_by_state(RUNNING))
        return max(0, self._block_pool.num_available_blocks - running)

    @property
    def unclaimed_slots(self) -> int:
        """`free_slots` minus those for entitled WAITING sequences."""
        return max(0, self.free_slots - len(self._list_entitled_waiting()))

    @property
    def unclaimed_blocks(self) -> int:
        """`free_blocks` minus those that entitled WAITING sequences may need."""
        claimed = sum(
            self.count_blocks_for(sequence.context_len)
            for sequence in self._list_entitled_waiting()
        )
        return max(0, self.free_blocks - claimed)

    def count_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_pool.block_size)

    def check_context(self, key: AttemptKey, num_tokens: int) -> None:
        """Raise ContextLengthExceeded or OutOfBlocks if the context can never fit on this node."""
        if num_tokens >= self._limits.max_model_len:
            raise ContextLengthExceeded(
                f"{key} has {num_tokens} tokens, max_model_len is {self._limits.max_model_len}:"
                " raise --max-model-len or shorten the prompt"
            )
        needed = self.count_blocks_for(num_tokens)
        if needed > self._block_pool.num_blocks:
            raise OutOfBlocks(
                f"{key} needs {needed} blocks, the cache has {self._block_pool.num_blocks}:"
                " raise --kv-memory"
            )

    def get_load(self) -> SchedulerLoad:
        queued = sum(
            sequence.context_len - sequence.num_computed_tokens
            for state in (WAITING, PREFILLING)
            for sequence in self._sequences.get_by_state(state).values()
        )
        return SchedulerLoad(
            {state: len(self._sequences.get_by_state(state)) for state in SequenceState}, queued
        )

    def _list_entitled_waiting(self) -> SequenceOf[Sequence]:
        return [
            sequence
            for sequence in self._sequences.get_by_state(WAITING).values()
            if not sequence.is_unticketed
        ]
