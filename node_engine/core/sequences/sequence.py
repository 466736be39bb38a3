"""One node's work on one attempt. The scheduler owns it; it never leaves the process.

    add -----> WAITING --admitted--> PREFILLING --first token--> RUNNING
                ^   ^                  |    |                       ^
                |   +---- dropped -----+    | first token,          | adopt
                |                           v hand-off or stop      |
                +-------- dropped ------ HANDING_OFF     expect -> AWAITING_KV

    any state -- finished, failed, released, cancelled --> FINISHED

`add` is for a context that this node computes, `expect` for one whose KV another node writes. A
sequence that hands off ends its prefill in HANDING_OFF and keeps its blocks until the shell
releases them.
"""

from dataclasses import dataclass, field
from enum import Enum

from baton.kv.hash_chain import HashChain
from baton.types import AttemptKey, AttemptSpec, BlockIndex, TicketId
from node_engine.core.blocks.block_ledger import BlockLedgerError
from node_engine.core.blocks.pool_prefix import PoolPrefix, RefCountedPin
from node_engine.core.step.step_batch import PromptLogprobsSpec, SequenceId
from node_engine.core.step.token_counts import TokenCounts, has_penalties


class SequenceState(Enum):
    WAITING = "waiting"  # no blocks yet
    PREFILLING = "prefilling"  # has every block of its context, computes it in chunks
    HANDING_OFF = (
        "handing_off"  # computes nothing any more; its blocks are being read by the sender
    )
    AWAITING_KV = "awaiting_kv"  # a ticket for the blocks that it lacks is out
    RUNNING = "running"  # one token per step
    FINISHED = "finished"  # holds nothing


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
    """Label of the references that a hand-off has of its own on its source blocks, for as long as
    they may be read."""
    return f"handoff {key}"


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` are context and then what was sampled here. KV of the first `num_computed_tokens`
    of them is in the blocks of `block_table`, which only grows until the sequence ends or is
    dropped."""

    id: SequenceId
    work: AttemptSpec
    token_ids: list[int]
    chain: HashChain
    is_prefill_only: bool  # prefill only: end with the first token
    has_ticket: bool = False  # somebody has promised room for what is handed off
    is_stopped: bool = False  # hands off nothing more; blocks wait for the sender to let go
    ticket_id: TicketId | None = None  # under which another node writes `reserved_blocks`
    reserved_blocks: tuple[BlockIndex, ...] = ()
    state: SequenceState = SequenceState.WAITING
    block_table: list[BlockIndex] = field(default_factory=list)
    num_computed_tokens: int = 0
    # tokens of the context that were not computed here: this node's cache or the pool had them
    num_cached_tokens: int = 0
    num_pool_tokens: int = 0  # of these, the pool's
    num_remote_pool_tokens: int = 0  # of these, what another host's pool has sent for this sequence
    num_pool_blocks: int = 0  # blocks of the table that are the pool's
    pool_prefix: PoolPrefix | None = None  # what the pool was found to have, until blocks are given
    pool_pins: list[RefCountedPin] = field(
        default_factory=list
    )  # under which the table's pool blocks are read
    num_indexed_blocks: int = 0  # blocks offered to the prefix index
    num_published_blocks: int = 0  # blocks offered to the shared pool
    is_publishing: bool = False  # and they are on their way there
    pending_copy: tuple[BlockIndex, BlockIndex] | None = (
        None  # copy on write that the next step has to make
    )
    recomputed_until: tuple[int, str] = (
        0,
        "",
    )  # tokens that it computes again, for the class that took their blocks
    owner: str = ""
    arrival_order: int = 0  # counts arrivals and tickets in one order
    virtual_deadline: int = 0  # in the scheduler's own time: whoever is due earlier computes first
    has_penalties: bool = False
    needs_prompt_logprobs: bool = False  # its prompt is
    token_counts: TokenCounts | None = (
        None  # as of the last token drawn, of a sequence that is penalized
    )

    def __post_init__(self) -> None:
        self.owner, self.arrival_order = str(self.work.key), self.id
        params = self.work.request.sampling
        self.has_penalties, self.needs_prompt_logprobs = (
            has_penalties(params),
            params.prompt_logprobs is not None,
        )

    @property
    def key(self) -> AttemptKey:
        return self.work.key

    @property
    def context_len(self) -> int:
        """Tokens whose KV must exist before the first token can be sampled."""
        return len(self.work.request.prompt_token_ids) + len(self.work.emitted_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of output, those of earlier attempts included."""
        return len(self.token_ids) - len(self.work.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Every token of output so far, those of earlier attempts included: what Seal carries."""
        return tuple(self.token_ids[len(self.work.request.prompt_token_ids) :])

    @property
    def num_own_blocks(self) -> int:
        """Blocks of the table that are this arena's."""
        return len(self.block_table) - self.num_pool_blocks

    @property
    def is_unticketed(self) -> bool:
        """Prefill for a hand-off that nobody has promised room for yet: its blocks are the first to
        go."""
        return self.is_prefill_only and not self.has_ticket and not self.is_stopped

    @property
    def priority_key(self) -> tuple[bool, int, int, int]:
        """Who goes first: the firm before the speculative, higher classes before lower ones, then
        who is due first."""
        return self.is_unticketed, self.priority_level, self.virtual_deadline, self.arrival_order

    @property
    def priority_level(self) -> int:
        """Place of its class in the strict order: 0 goes first."""
        return self.work.request.principal.priority_level

    @property
    def tenant_class(self) -> str:
        return self.work.request.principal.tenant_class

    def charged_class_at(self, position: int) -> str:
        """The class that computing the context at this position is charged to: its own, unless
        another one made it necessary to do it again."""
        end, payer = self.recomputed_until
        return payer if position < end else self.work.prefill_charged_class or self.tenant_class

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens of output that may still come."""
        return self.work.request.sampling.max_tokens - self.num_output_tokens

    @property
    def has_started_prefill(self) -> bool:
        """Some of its context has been computed here."""
        return self.num_computed_tokens > self.num_cached_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens at the beginning of the context whose KV may come from a cache: all but the last,
        whose logits give the next token. None if the prompt is to be scored: that takes the logits
        of every position."""
        return 0 if self.needs_prompt_logprobs else self.context_len - 1

    def set_pool_prefix(self, pooled: PoolPrefix | None) -> None:
        """What the shared pool has of the context, instead of what it was said to have."""
        if self.pool_prefix is not None:
            self.pool_prefix.release()
        self.pool_prefix = pooled

    def update_token_counts(self) -> TokenCounts:
        """What penalties count, brought up to the present. Tokens are counted once each."""
        request = self.work.request
        if self.token_counts is None:
            self.token_counts = TokenCounts(
                request.prompt_token_ids if request.sampling.repetition_penalty != 1.0 else ()
            )
        self.token_counts.add_output_tokens(
            self.token_ids[len(request.prompt_token_ids) + self.token_counts.num_output_tokens :]
        )
        return self.token_counts

    def build_logprobs_spec(self, start: int, end: int) -> PromptLogprobsSpec | None:
        """Which tokens of the prompt a slice of positions [start, end) has to score."""
        request = self.work.request
        top, targets = (
            request.sampling.prompt_logprobs,
            request.prompt_token_ids[start + 1 : end + 1],
        )
        return PromptLogprobsSpec(targets, top) if top is not None and targets else None

    def restart_prefill(self, payer: str = "") -> None:
        """Forget what was computed and drawn here. `payer`: another class, which is charged for it
        the next time."""
        if payer:
            self.recomputed_until = max(self.recomputed_until[0], self.num_computed_tokens), payer
        del self.token_ids[self.context_len :]
        self.num_computed_tokens = self.num_cached_tokens = self.num_pool_tokens = (
            self.num_remote_pool_tokens
        ) = 0
        self.num_indexed_blocks = self.num_published_blocks = 0
        self.token_counts = None

    def change_state(self, state: SequenceState) -> None:
        if state not in _LEGAL_TRANSITIONS[self.state]:
            raise BlockLedgerError(
                f"sequence {self.key} is {self.state.value}: it cannot become {state.value}"
            )
        self.state = state
