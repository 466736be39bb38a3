"""A sequence: one node's work on one attempt. The scheduler owns it; it never leaves the process.

    add_sequence --> WAITING --admitted--> PREFILLING --first token--> RUNNING
                       ^  ^                  |    |                       ^
                       |  +---- requeued ----+    | first token of a      | commit_handoff
                       |                          v hand-off, or stopped  |
                       +------- requeued ------ HANDING_OFF          AWAITING_KV
                                                                          ^
                                                  reserve_for_handoff ----+

    any state -- finished, failed, released, cancelled --> FINISHED

`add_sequence` is for a context that this node computes, `reserve_for_handoff` for one whose KV
another node writes. A sequence that is handed off ends its prefill in HANDING_OFF and keeps its
blocks until the role releases them.

The live sequences of a node, found by key, by id and by state.
"""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from baton.kv.blocks import HashChain
from baton.types import AttemptKey, AttemptSpec, BlockIndex, TicketId
from node_engine.core.blocks.block_records import BlockLedgerError
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.sequences.stop_rules import forbidden_token_ids, unwanted_ends
from node_engine.core.sequences.token_constraint import TokenConstraint
from node_engine.core.speculation.drafting import Drafting
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    TokenCounts,
    TokenMask,
)


class SequenceState(Enum):
    WAITING = "waiting"  # no blocks yet
    PREFILLING = "prefilling"  # has every block of its context, computes it in chunks
    HANDING_OFF = "handing_off"  # prefill is over; the sender is reading its blocks
    AWAITING_KV = "awaiting_kv"  # a ticket for its missing blocks has been granted
    RUNNING = "running"  # one token per step, or more with drafts
    FINISHED = "finished"  # no blocks


_LEGAL_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset(
        {
            SequenceState.PREFILLING,
            SequenceState.HANDING_OFF,
            SequenceState.AWAITING_KV,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.PREFILLING: frozenset(
        {
            SequenceState.WAITING,
            SequenceState.HANDING_OFF,
            SequenceState.RUNNING,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.HANDING_OFF: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.AWAITING_KV: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


def handoff_owner_label(key: AttemptKey) -> str:
    """Owner label under which a hand-off holds references on the source blocks that it may read."""
    return f"handoff {key}"


@dataclass(slots=True)
class PoolUse:
    """What a sequence has of the host's shared pool."""

    prefix: PoolPrefix | None = None  # result of the look-up, until admission
    pins: list[RefCountedPin] = field(default_factory=list)  # its pool blocks are read under these
    num_blocks: int = 0  # blocks of its block table that belong to the pool
    num_tokens: int = 0  # context tokens found in the pool
    num_remote_tokens: int = 0  # of these, sent by another host's pool for this sequence

    def set_prefix(self, prefix: PoolPrefix | None) -> None:
        """Replace the result of the look-up, and release the previous one."""
        if self.prefix is not None:
            self.prefix.release()
        self.prefix = prefix


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one sequence. Its block table only grows until the sequence ends or is requeued."""

    id: SequenceId
    work: AttemptSpec
    token_ids: list[int]  # the context, then the tokens sampled here
    chain: HashChain
    is_prefill_only: bool  # ends with the first token: the rest is decoded on another node
    has_ticket: bool = False  # a decode node has reserved blocks for the hand-off
    is_stopped: bool = False  # its prefill was stopped; the sender may still read its blocks
    ticket_id: TicketId | None = None  # under which another node writes `reserved_blocks`
    reserved_blocks: tuple[BlockIndex, ...] = ()
    state: SequenceState = SequenceState.WAITING
    block_table: list[BlockIndex] = field(default_factory=list)
    num_computed_tokens: int = 0  # leading tokens whose KV is in the blocks of `block_table`
    num_cached_tokens: int = 0  # context tokens found in this node's cache or in the pool
    pool_use: PoolUse = field(default_factory=PoolUse)
    num_indexed_blocks: int = 0  # leading blocks that were added to the prefix index
    num_published_blocks: int = 0  # leading blocks that were offered to the shared pool
    is_publishing: bool = False  # a publication to the shared pool is in progress
    # Source and destination of the copy on write that the next step must make.
    pending_copy: tuple[BlockIndex, BlockIndex] | None = None
    recomputed_until: int = 0  # leading tokens that are computed again after a requeue
    recompute_charged_class: str = ""  # the tenant class that is charged for them
    arrival_order: int = 0  # position in the common order of arrivals and tickets
    virtual_deadline: int = 0  # in tokens computed by this node; see the scheduler
    token_counts: TokenCounts | None = None  # only with penalties; as of the last sampled token
    constraint: TokenConstraint | None = None  # of the output's grammar; as of the last token
    drafting: Drafting | None = None  # with speculative decoding, once it runs

    # What follows from `work`.
    key: AttemptKey = field(init=False)
    owner: str = field(init=False)  # label of its references in the block pool
    context_len: int = field(init=False)  # tokens whose KV the first sampled token needs
    # Leading context tokens whose KV may come from a cache: all but the last token, whose logits
    # give the next one. With prompt logprobs 0, because they need the logits of every position.
    num_reusable_tokens: int = field(init=False)
    priority_level: int = field(init=False)  # of its tenant class; 0 is served first
    tenant_class: str = field(init=False)
    has_penalties: bool = field(init=False)
    needs_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.work.request
        self.key = self.work.key
        self.owner = str(self.key)
        self.arrival_order = self.id
        self.context_len = len(request.prompt_token_ids) + len(self.work.emitted_token_ids)
        self.priority_level = request.principal.priority_level
        self.tenant_class = request.principal.tenant_class
        self.has_penalties = request.sampling.has_penalties
        self.needs_prompt_logprobs = request.sampling.prompt_logprobs is not None
        self.num_reusable_tokens = 0 if self.needs_prompt_logprobs else self.context_len - 1

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens, those of earlier attempts included."""
        return len(self.token_ids) - len(self.work.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """All output tokens so far, those of earlier attempts included."""
        return tuple(self.token_ids[len(self.work.request.prompt_token_ids) :])

    @property
    def num_own_blocks(self) -> int:
        """Number of blocks of the table that belong to this node's arena."""
        return len(self.block_table) - self.pool_use.num_blocks

    @property
    def is_unticketed(self) -> bool:
        """Prefill for a hand-off without a ticket so far: its blocks are the first to be taken."""
        return self.is_prefill_only and not self.has_ticket and not self.is_stopped

    @property
    def priority_key(self) -> tuple[bool, int, int, int]:
        """Sort key of prefills: unticketed ones last, then by class, then by virtual deadline."""
        return self.is_unticketed, self.priority_level, self.virtual_deadline, self.arrival_order

    def charged_class_at(self, position: int) -> str:
        """The class that is charged for computing the context at `position`.

        Its own, unless another class took its blocks, so that they must be computed again.
        """
        if position < self.recomputed_until:
            return self.recompute_charged_class
        return self.work.prefill_charged_class or self.tenant_class

    @property
    def num_remaining_tokens(self) -> int:
        """Largest number of output tokens still to come."""
        return self.work.request.sampling.max_tokens - self.num_output_tokens

    @property
    def has_started_prefill(self) -> bool:
        """Whether some of its context has been computed here."""
        return self.num_computed_tokens > self.num_cached_tokens

    def update_token_counts(self) -> TokenCounts:
        """Add the tokens sampled since the last call to the token counts; returns the counts."""
        request = self.work.request
        if self.token_counts is None:
            self.token_counts = TokenCounts(
                request.prompt_token_ids if request.sampling.repetition_penalty != 1.0 else ()
            )
        self.token_counts.add_output_tokens(
            self.token_ids[len(request.prompt_token_ids) + self.token_counts.num_output_tokens :]
        )
        return self.token_counts

    def build_slice(self, length: int, eos_token_ids: Collection[int]) -> SequenceSlice:
        """Its next `length` tokens for a step, with a sample if they are the last ones it has.

        Behind the last one come the draft tokens that the step verifies.
        """
        start = self.num_computed_tokens
        end = start + length
        draft: SequenceOf[int] = ()
        draft_specs: tuple[SampleSpec, ...] = ()
        sample = None
        if end == len(self.token_ids):
            if self.drafting is not None and self.drafting.verified_tokens:
                draft_specs = self._build_draft_specs(self.drafting, eos_token_ids)
                draft = self.drafting.verified_tokens
            sample = self._build_sample_spec(eos_token_ids)
        return SequenceSlice(
            self.id,
            (*self.token_ids[start:end], *draft),
            start,
            self.block_table,
            sample,
            self._build_logprobs_spec(start, end) if self.needs_prompt_logprobs else None,
            draft_specs,
        )

    def _build_sample_spec(
        self,
        eos_token_ids: Collection[int],
        draft: SequenceOf[int] = (),
        draft_mask: TokenMask | None = None,
    ) -> SampleSpec:
        """How to sample the next token, or the one after `draft` with its mask there."""
        params = self.work.request.sampling
        num_output_tokens = self.num_output_tokens + len(draft)
        forbidden = forbidden_token_ids(params, eos_token_ids, num_output_tokens)
        mask = draft_mask
        if self.constraint is not None:
            if mask is None:
                mask = self.constraint.start_mask_computation(
                    unwanted_ends(params, eos_token_ids, num_output_tokens)
                )
            forbidden = ()  # the mask leaves them out
        counts = self.update_token_counts() if self.has_penalties else None
        return SampleSpec(
            params,
            self.key.choice_index,
            len(self.token_ids) + len(draft),
            forbidden,
            counts.count_draft(draft) if counts is not None and draft else counts,
            mask,
            may_continue=num_output_tokens + 1 < params.max_tokens,
        )

    def _build_draft_specs(
        self, drafting: Drafting, eos_token_ids: Collection[int]
    ) -> tuple[SampleSpec, ...]:
        """How to sample after each draft. Drops the drafts that the grammar does not allow."""
        draft, params = drafting.verified_tokens, self.work.request.sampling
        masks: SequenceOf[TokenMask | None] = [None] * len(draft)
        if self.constraint is not None:
            masks = self.constraint.start_draft_mask_computations(
                draft,
                [
                    unwanted_ends(params, eos_token_ids, self.num_output_tokens + number)
                    for number in range(1, len(draft) + 1)
                ],
            )
            drafting.verified_tokens = draft[: len(masks)]
        return tuple(
            self._build_sample_spec(eos_token_ids, draft[:number], mask)
            for number, mask in enumerate(masks, 1)
        )

    def _build_logprobs_spec(self, start: int, end: int) -> PromptLogprobsSpec | None:
        """The logprobs to compute in a slice of positions [start, end); None without any."""
        request = self.work.request
        top = request.sampling.prompt_logprobs
        targets = request.prompt_token_ids[start + 1 : end + 1]
        return PromptLogprobsSpec(targets, top) if top is not None and targets else None

    def restart_prefill(self, charged_class: str = "") -> None:
        """Discard all that was computed and sampled here.

        `charged_class`, if given, is charged for computing it again instead of its own class.
        """
        if charged_class:
            self.recomputed_until = max(self.recomputed_until, self.num_computed_tokens)
            self.recompute_charged_class = charged_class
        if self.constraint is not None:
            self.constraint.roll_back(len(self.token_ids) - self.context_len)
        del self.token_ids[self.context_len :]
        self.num_computed_tokens = self.num_cached_tokens = 0
        self.pool_use.num_tokens = self.pool_use.num_remote_tokens = 0
        self.num_indexed_blocks = self.num_published_blocks = 0
        self.token_counts = None

    def change_state(self, state: SequenceState) -> None:
        if state not in _LEGAL_TRANSITIONS[self.state]:
            raise BlockLedgerError(
                f"sequence {self.key} is {self.state.value}: it cannot become {state.value}"
            )
        self.state = state


class SequenceTable:
    """All sequences that are not FINISHED, at most one per attempt key."""

    def __init__(self) -> None:
        self._by_key: dict[AttemptKey, Sequence] = {}
        self._by_state: dict[SequenceState, dict[SequenceId, Sequence]] = {
            state: {} for state in SequenceState
        }

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: AttemptKey) -> Sequence | None:
        return self._by_key.get(key)

    def require_sequence(self, key: AttemptKey, *states: SequenceState) -> Sequence:
        """Raises BlockLedgerError unless the sequence exists and is in one of `states`."""
        sequence = self._by_key.get(key)
        if sequence is None or sequence.state not in states:
            state = sequence.state.value if sequence else "unknown"
            raise BlockLedgerError(
                f"sequence {key} is {state}, not one of {[expected.value for expected in states]}"
            )
        return sequence

    def get_by_state(self, state: SequenceState) -> Mapping[SequenceId, Sequence]:
        return self._by_state[state]

    def add_sequence(self, sequence: Sequence) -> None:
        if sequence.key in self._by_key:
            raise BlockLedgerError(f"sequence {sequence.key} exists already")
        self._by_key[sequence.key] = sequence
        self._by_state[sequence.state][sequence.id] = sequence

    def change_state(self, sequence: Sequence, state: SequenceState) -> None:
        before = sequence.state
        sequence.change_state(state)
        del self._by_state[before][sequence.id]
        if state is SequenceState.FINISHED:
            del self._by_key[sequence.key]
        else:
            self._by_state[state][sequence.id] = sequence
