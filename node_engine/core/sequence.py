"""One node's work on one attempt. The scheduler owns it; it never leaves the process.

    add -----> WAITING --admitted--> PREFILLING --first token--> RUNNING
                ^   ^                  |    |                       ^
                |   +---- dropped -----+    | first token,          | adopt
                |                           v hand-off or stop      |
                +-------- dropped ------ HANDING_OFF     expect -> AWAITING_KV

    any state -- finished, failed, released, cancelled --> FINISHED

`add` is for a context that this node computes, `expect` for one whose KV another node writes. A sequence that hands off
ends its prefill in HANDING_OFF and keeps its blocks until the shell releases them.
"""

from dataclasses import dataclass, field
from enum import Enum

from baton.hash_chain import HashChain
from baton.types import AttemptKey, BlockIndex, TicketId, Work
from node_engine.core.ledger import LedgerError
from node_engine.core.pooled import Pooled, PoolHold
from node_engine.core.step import ScoreSpec, SequenceId
from node_engine.core.token_counts import TokenCounts, penalizes


class SequenceState(Enum):
    WAITING = "waiting"  # no blocks yet
    PREFILLING = "prefilling"  # has every block of its context, computes it in chunks
    HANDING_OFF = "handing_off"  # computes nothing any more; its blocks are being read by the sender
    AWAITING_KV = "awaiting_kv"  # a ticket for the blocks that it lacks is out
    RUNNING = "running"  # one token per step
    FINISHED = "finished"  # holds nothing


_LEGAL: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset(
        {
            SequenceState.PREFILLING,
            SequenceState.HANDING_OFF,
            SequenceState.AWAITING_KV,
            SequenceState.FINISHED,
        }
    ),
    SequenceState.PREFILLING: frozenset(
        {SequenceState.WAITING, SequenceState.HANDING_OFF, SequenceState.RUNNING, SequenceState.FINISHED}
    ),
    SequenceState.HANDING_OFF: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.AWAITING_KV: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


def pin_label(key: AttemptKey) -> str:
    """Label of the references that a hand-off has of its own on its source blocks, for as long as they may be read."""
    return f"handoff {key}"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are context and then what was sampled here. KV of the first `num_computed` of them is in the blocks of
    `block_table`, which only grows until the sequence ends or is dropped."""

    id: SequenceId
    work: Work
    tokens: list[int]
    chain: HashChain
    hand_off: bool  # prefill only: end with the first token
    has_ticket: bool = False  # somebody has promised room for what is handed off
    stopped: bool = False  # hands off nothing more; blocks wait for the sender to let go
    ticket: TicketId | None = None  # under which another node writes `promised`
    promised: tuple[BlockIndex, ...] = ()
    state: SequenceState = SequenceState.WAITING
    block_table: list[BlockIndex] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0  # tokens of the context that were not computed here: this node's cache or the pool had them
    num_pooled: int = 0  # of these, the pool's
    num_remote: int = 0  # of these, what another host's pool has sent for this sequence
    num_borrowed: int = 0  # blocks of the table that are the pool's
    pooled: Pooled | None = None  # what the pool was found to have, until blocks are given
    holds: list[PoolHold] = field(default_factory=list)  # under which the table's pool blocks are read
    num_sealed: int = 0  # blocks offered to the prefix index
    num_shared: int = 0  # blocks offered to the shared pool
    publishing: bool = False  # and they are on their way there
    copy: tuple[BlockIndex, BlockIndex] | None = None  # copy on write that the next step has to make
    redone: tuple[int, str] = (0, "")  # tokens that it computes again, for the class that took their blocks
    owner: str = ""
    turn: int = 0  # counts arrivals and tickets in one order
    due: int = 0  # in the scheduler's own time: whoever is due earlier computes first
    penalized: bool = False
    scored: bool = False  # its prompt is
    counts: TokenCounts | None = None  # as of the last token drawn, of a sequence that is penalized

    def __post_init__(self) -> None:
        self.owner, self.turn = str(self.work.key), self.id
        params = self.work.request.sampling
        self.penalized, self.scored = penalizes(params), params.prompt_logprobs is not None

    @property
    def key(self) -> AttemptKey:
        return self.work.key

    @property
    def context_len(self) -> int:
        """Tokens whose KV must exist before the first token can be sampled."""
        return len(self.work.request.prompt) + len(self.work.emitted)

    @property
    def num_generated(self) -> int:
        """Tokens of output, those of earlier attempts included."""
        return len(self.tokens) - len(self.work.request.prompt)

    @property
    def output(self) -> tuple[int, ...]:
        """Every token of output so far, those of earlier attempts included: what Seal carries."""
        return tuple(self.tokens[len(self.work.request.prompt) :])

    @property
    def num_own(self) -> int:
        """Blocks of the table that are this arena's."""
        return len(self.block_table) - self.num_borrowed

    @property
    def speculative(self) -> bool:
        """Prefill for a hand-off that nobody has promised room for yet: its blocks are the first to go."""
        return self.hand_off and not self.has_ticket and not self.stopped

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Who goes first: the firm before the speculative, higher classes before lower ones, then who is due first."""
        return self.speculative, self.level, self.due, self.turn

    @property
    def level(self) -> int:
        """Place of its class in the strict order: 0 goes first."""
        return self.work.request.standing.level

    @property
    def tenant_class(self) -> str:
        return self.work.request.standing.tenant_class

    def payer(self, position: int) -> str:
        """The class that computing the context at this position is charged to: its own, unless another one made it
        necessary to do it again."""
        end, payer = self.redone
        return payer if position < end else self.work.prefill_payer or self.tenant_class

    @property
    def remaining(self) -> int:
        """Tokens of output that may still come."""
        return self.work.request.sampling.max_tokens - self.num_generated

    @property
    def begun(self) -> bool:
        """Some of its context has been computed here."""
        return self.num_computed > self.num_cached

    @property
    def reusable_tokens(self) -> int:
        """Tokens at the beginning of the context whose KV may come from a cache: all but the last, whose logits give
        the next token. None if the prompt is to be scored: that takes the logits of every position."""
        return 0 if self.scored else self.context_len - 1

    def offer(self, pooled: Pooled | None) -> None:
        """What the shared pool has of the context, instead of what it was said to have."""
        if self.pooled is not None:
            self.pooled.done()
        self.pooled = pooled

    def counted(self) -> TokenCounts:
        """What penalties count, brought up to the present. Tokens are counted once each."""
        request = self.work.request
        if self.counts is None:
            self.counts = TokenCounts(request.prompt if request.sampling.repetition_penalty != 1.0 else ())
        self.counts.add(self.tokens[len(request.prompt) + self.counts.num_output :])
        return self.counts

    def scoring(self, start: int, end: int) -> ScoreSpec | None:
        """Which tokens of the prompt a slice of positions [start, end) has to score."""
        request = self.work.request
        top, targets = request.sampling.prompt_logprobs, request.prompt[start + 1 : end + 1]
        return ScoreSpec(targets, top) if top is not None and targets else None

    def restart(self, payer: str = "") -> None:
        """Forget what was computed and drawn here. `payer`: another class, which is charged for it the next time."""
        if payer:
            self.redone = max(self.redone[0], self.num_computed), payer
        del self.tokens[self.context_len :]
        self.num_computed = self.num_cached = self.num_pooled = self.num_remote = 0
        self.num_sealed = self.num_shared = 0
        self.counts = None

    def become(self, state: SequenceState) -> None:
        if state not in _LEGAL[self.state]:
            raise LedgerError(f"sequence {self.key} is {self.state.value}: it cannot become {state.value}")
        self.state = state
