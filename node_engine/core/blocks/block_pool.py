"""Who may touch which block of the arena. Pure bookkeeping: no memory is read or written here.

    FREE --allocate------------------------------------------> IN_USE --last release--> CACHED  or FREE
    FREE --reserve--> RESERVED --mark_writing--> WRITING --commit-^ ^----- match, share ---- CACHED
                         |                          |                                       CACHED --evict--> FREE
                         +------------+-------------+
                                      +--release_ticket--> FREE
                                      +--quarantine------> QUARANTINED --fenced--> FREE

After its last release a block is CACHED if it is sealed (full, or the end of somebody's context)
and the only one with its content, else FREE. Every reference is held under an owner's label, once
per (owner, block): releasing what one does not hold is an error, and the ledger can name everybody.
Running out of blocks is an answer (None); an illegal transition is a LedgerError.

Eviction is least recently used first. `release` takes a sequence's blocks in table order and
retires them last first, and whoever holds a block holds its whole prefix; so a parent retires after
its children and is evicted after them: no cached block is stranded behind an evicted parent. (If a
caller breaks that order, the stranded block is not found until its parent is computed again.)

Block tables may also name blocks of the host's shared pool: global indices from `total` on
(baton/shared_memory/addressing.py). They are not this arena's, and no books are kept on them here:
sharing and releasing them is nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.kv.block_hash import BlockHash, block_hash
from baton.kv.cache_journal import CacheJournal
from baton.kv.hash_chain import HashChain
from baton.types import BlockIndex, TicketId
from node_engine.core.blocks.block_ledger import (
    BlockLedger,
    BlockLedgerEntry,
    BlockLedgerError,
    BlockState,
    require_invariant,
)
from node_engine.core.blocks.block_ownership import BlockOwnership
from node_engine.core.blocks.prefix_index import IndexedBlock, PrefixIndex


@dataclass(frozen=True, slots=True)
class PartialHit:
    """The first `num_tokens` tokens of `source_block` are what the next block begins with: copy it,
    then go on in the copy."""

    source_block: BlockIndex
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What can be read of a context; the owner has a reference on every own block named here,
    `partial.source` included."""

    blocks: tuple[BlockIndex, ...]
    partial_hit: PartialHit | None
    num_tokens: int  # covered by `blocks` and `partial_hit` together


@dataclass(slots=True)
class _TicketReservation:
    """The blocks of a ticket that has not committed."""

    owner: str
    blocks: tuple[BlockIndex, ...]
    state: BlockState
    since: float


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Called on the compute thread only; `clock` gives
    the ledger's ages."""

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache_journal = CacheJournal()
        self.prefix_index = PrefixIndex(self._on_block_indexed, self._on_block_unindexed)
        self._clock = clock
        self._ownership = BlockOwnership(num_blocks, clock)
        self._free = [
            BlockIndex(block) for block in range(num_blocks)
        ]  # a heap: lowest first keeps runs together
        self._cached_lru: OrderedDict[BlockIndex, None] = OrderedDict()  # least recently used first
        self._reservations: dict[TicketId, _TicketReservation] = {}

    # what there is

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation can get now, by eviction if need be."""
        return len(self._free) + len(self._cached_lru)

    def get_block_state(self, block: BlockIndex) -> BlockState:
        return self._ownership.get_block_state(block)

    def get_ref_count(self, block: BlockIndex) -> int:
        """Owners of a block that is IN_USE, else 0."""
        return self._ownership.get_ref_count(block)

    def count_blocks(self, state: BlockState) -> int:
        return self._ownership.count_blocks(state)

    def count_blocks_by_state(self) -> dict[BlockState, int]:
        return self._ownership.count_blocks_by_state()

    def count_blocks_held_by(self, owner: str) -> int:
        """Blocks on which `owner` has a reference."""
        return self._ownership.count_blocks_held_by(owner)

    def is_own_block(self, block: BlockIndex) -> bool:
        """Whether it is a block of this arena, and not of the shared pool."""
        return block < self.num_blocks

    # local work

    def allocate_blocks(self, count: int, owner: str) -> tuple[BlockIndex, ...] | None:
        """`count` blocks for `owner`, ascending; None, and nothing changed, if there are not that
        many."""
        blocks = self._take_free_blocks(count)
        if blocks is None:
            return None
        for block in blocks:
            self._ownership.change_state(block, BlockState.FREE, BlockState.IN_USE)
            self._ownership.add_reference(block, owner)
        return blocks

    def share_blocks(self, blocks: Iterable[BlockIndex], owner: str) -> None:
        """One more owner for blocks that are IN_USE or CACHED."""
        for block in filter(self.is_own_block, blocks):
            if self.get_block_state(block) is BlockState.CACHED:
                del self._cached_lru[block]
                self._ownership.change_state(block, BlockState.CACHED, BlockState.IN_USE)
            elif self.get_block_state(block) is not BlockState.IN_USE:
                raise BlockLedgerError(
                    f"block {block} is {self.get_block_state(block).value}: only committed blocks are shared"
                )
            self._ownership.add_reference(block, owner)

    def release_blocks(self, blocks: Sequence[BlockIndex], owner: str) -> None:
        """Give up `owner`'s reference on each of `blocks`, which come in table order."""
        for block in reversed(blocks):
            if self.is_own_block(block) and self._ownership.remove_reference(block, owner):
                self._retire_block(block)

    # prefixes

    def match_prefix(
        self,
        chain: HashChain,
        max_tokens: int,
        owner: str,
        *,
        allow_partial: bool = True,
        pooled: Sequence[BlockIndex] = (),
    ) -> PrefixMatch:
        """The longest beginning of `chain.tokens`, at most `max_tokens` long, whose KV is here or
        in `pooled`, the shared pool's blocks of that beginning; references are taken on own ones,
        which go first."""
        blocks = self._find_blocks(chain, max_tokens, pooled)
        covered = len(blocks) * self.block_size
        partial: PartialHit | None = None
        if allow_partial:
            rest = chain.tokens[covered : min(max_tokens, covered + self.block_size)]
            found = (
                self.prefix_index.find_partial_match(chain.parent_hash(len(blocks)), rest)
                if rest
                else None
            )
            partial = PartialHit(*found) if found else None
        self.share_blocks((*blocks, partial.source_block) if partial else blocks, owner)
        return PrefixMatch(tuple(blocks), partial, covered + (partial.num_tokens if partial else 0))

    def index_block(
        self, block: BlockIndex, chain: HashChain, number: int, length: int | None = None
    ) -> None:
        """`block` is logical block `number` of `chain`, computed and committed: make it findable.
        With `length` only its first tokens, so many: its owner goes on writing behind them, and
        seals the block again when it is full.

        Of blocks with equal content the first stays the one that is found; a CACHED one makes way
        for one in use.
        """
        if self.get_block_state(block) is not BlockState.IN_USE:
            raise BlockLedgerError(
                f"block {block} is {self.get_block_state(block).value}: only a block in use is sealed"
            )
        tokens = chain.block_tokens(number)[:length]
        if block in self.prefix_index:
            if len(self.prefix_index.get_entry(block).token_ids) >= len(tokens):
                raise BlockLedgerError(f"block {block} was sealed before")
            self.prefix_index.remove_block(block)
        name = (
            chain.block_hash(number)
            if length is None
            else block_hash(chain.parent_hash(number), tokens)
        )
        twins = self.prefix_index.list_blocks_with_hash(name)
        if twins and self.get_block_state(twins[0]) is BlockState.CACHED:
            self._evict_block(twins[0])
        self.prefix_index.add_block(block, IndexedBlock(name, chain.parent_hash(number), tokens))

    def find_own_suffix(self, chain: HashChain, end: int) -> tuple[BlockIndex, ...]:
        """The blocks of this arena that hold the full blocks of `chain` up to `end`, as far back as
        they are here without a gap."""
        found: list[BlockIndex] = []
        for number in range(end - 1, -1, -1):
            block = self.prefix_index.find_block(
                chain.block_hash(number), chain.parent_hash(number), chain.block_tokens(number)
            )
            if block is None:
                break
            found.append(block)
        return tuple(reversed(found))

    def unindex_block(self, block: BlockIndex) -> None:
        """Nobody finds this sealed block any more: it is FREE at once, or with its last release."""
        if self.get_block_state(block) is BlockState.CACHED:
            self._evict_block(block)
        else:
            self.prefix_index.remove_block(block)

    def iter_full_block_hashes(self) -> Iterator[BlockHash]:
        """Of every full block that can be found, each content once."""
        return (
            entry.block_hash
            for entry in self.prefix_index.iter_contents()
            if len(entry.token_ids) == self.block_size
        )

    # hand-offs

    def reserve_for_ticket(
        self, count: int, ticket: TicketId, owner: str
    ) -> tuple[BlockIndex, ...] | None:
        """`count` blocks for the writer of `ticket`, ascending; None, and nothing changed, if there
        are not that many."""
        if ticket in self._reservations or count < 1:
            raise BlockLedgerError(f"ticket {ticket}: {count} blocks, or it is known already")
        blocks = self._take_free_blocks(count)
        if blocks is None:
            return None
        for block in blocks:
            self._ownership.change_state(block, BlockState.FREE, BlockState.RESERVED)
        self._reservations[ticket] = _TicketReservation(
            owner, blocks, BlockState.RESERVED, self._clock()
        )
        return blocks

    def mark_writing(self, ticket: TicketId) -> None:
        """The writer has begun."""
        self._change_ticket_state(ticket, (BlockState.RESERVED,), BlockState.WRITING)

    def commit_ticket(self, ticket: TicketId) -> tuple[BlockIndex, ...]:
        """Everything has landed and the writer is gone: the blocks are the owner's."""
        promise = self._end_reservation(ticket, (BlockState.WRITING,), BlockState.IN_USE)
        for block in promise.blocks:
            self._ownership.add_reference(block, promise.owner)
        return promise.blocks

    def release_ticket(self, ticket: TicketId) -> None:
        """The hand-off is lost and its writer is fenced."""
        self._free_reserved_blocks(
            self._end_reservation(
                ticket, (BlockState.RESERVED, BlockState.WRITING), BlockState.FREE
            )
        )

    def quarantine_ticket(self, ticket: TicketId) -> None:
        """The hand-off is lost, but its writer may still write."""
        self._change_ticket_state(
            ticket, (BlockState.RESERVED, BlockState.WRITING), BlockState.QUARANTINED
        )

    def free_quarantined_ticket(self, ticket: TicketId) -> None:
        """Proof is in hand that the writer of a quarantined ticket writes no more."""
        self._free_reserved_blocks(
            self._end_reservation(ticket, (BlockState.QUARANTINED,), BlockState.FREE)
        )

    # account

    def take_ledger(self) -> BlockLedger:
        now = self._clock()
        promised = (
            BlockLedgerEntry(
                promise.owner, promise.state, len(promise.blocks), now - promise.since, ticket
            )
            for ticket, promise in self._reservations.items()
        )
        return BlockLedger(
            self.num_blocks,
            self.count_blocks_by_state(),
            (*self._ownership.iter_ledger_entries(), *promised),
        )

    def check_invariants(self) -> None:
        """Raise LedgerError unless every count and every cross-reference agrees. Looks at
        everything: for tests."""
        self._ownership.check_invariants()
        self.prefix_index.check_invariants()
        require_invariant(
            sum(self.count_blocks_by_state().values()) == self.num_blocks,
            "the states do not add up to all blocks",
        )
        free, promises = set(self._free), list(self._reservations.values())
        require_invariant(len(free) == len(self._free), "a block is on the free list twice")
        promised = {block: promise.state for promise in promises for block in promise.blocks}
        require_invariant(
            len(promised) == sum(len(promise.blocks) for promise in promises),
            "a block is promised twice",
        )
        for number in range(self.num_blocks):
            block = BlockIndex(number)
            state = self.get_block_state(block)
            require_invariant(
                (block in free) == (state is BlockState.FREE),
                f"block {block} is {state}: free list",
            )
            require_invariant(
                (block in self._cached_lru) == (state is BlockState.CACHED),
                f"block {block} is {state}: cache",
            )
            if state in (BlockState.RESERVED, BlockState.WRITING, BlockState.QUARANTINED):
                require_invariant(
                    promised.pop(block, None) is state, f"block {block} is {state}: no such ticket"
                )
            if block in self.prefix_index:
                twins = self.prefix_index.list_blocks_with_hash(
                    self.prefix_index.get_entry(block).block_hash
                )
                require_invariant(
                    state is BlockState.IN_USE or len(twins) == 1,
                    f"block {block} is {state}: indexed",
                )
                require_invariant(
                    state in (BlockState.IN_USE, BlockState.CACHED),
                    f"block {block} is {state}: indexed",
                )
            else:
                require_invariant(
                    state is not BlockState.CACHED,
                    f"block {block} is cached, but nobody can find it",
                )
        require_invariant(not promised, "a ticket names blocks of another state")

    # the steps underneath

    def _on_block_indexed(self, entry: IndexedBlock) -> None:
        if len(entry.token_ids) == self.block_size:
            self.cache_journal.record_insertion(entry.block_hash)

    def _on_block_unindexed(self, entry: IndexedBlock) -> None:
        if len(entry.token_ids) == self.block_size:
            self.cache_journal.record_eviction(entry.block_hash)

    def _find_blocks(
        self, chain: HashChain, max_tokens: int, pooled: Sequence[BlockIndex]
    ) -> list[BlockIndex]:
        blocks: list[BlockIndex] = []
        for number in range(min(max_tokens, len(chain.tokens)) // self.block_size):
            block = self.prefix_index.find_block(
                chain.block_hash(number), chain.parent_hash(number), chain.block_tokens(number)
            )
            if block is None and number < len(pooled):
                block = pooled[number]
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take_free_blocks(self, count: int) -> tuple[BlockIndex, ...] | None:
        if count > self.num_available_blocks:
            return None
        while len(self._free) < count:
            self._evict_block(next(iter(self._cached_lru)))
        return tuple(heappop(self._free) for _ in range(count))

    def _evict_block(self, block: BlockIndex) -> None:
        del self._cached_lru[block]
        self.prefix_index.remove_block(block)
        self._ownership.change_state(block, BlockState.CACHED, BlockState.FREE)
        heappush(self._free, block)

    def _retire_block(self, block: BlockIndex) -> None:
        """The last reference is gone: keep the block as cache if nobody else holds the same
        content."""
        if (
            block in self.prefix_index
            and len(
                self.prefix_index.list_blocks_with_hash(
                    self.prefix_index.get_entry(block).block_hash
                )
            )
            == 1
        ):
            self._ownership.change_state(block, BlockState.IN_USE, BlockState.CACHED)
            self._cached_lru[block] = None
            return
        if block in self.prefix_index:
            self.prefix_index.remove_block(block)
        self._ownership.change_state(block, BlockState.IN_USE, BlockState.FREE)
        heappush(self._free, block)

    def _change_ticket_state(
        self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState
    ) -> _TicketReservation:
        promise = self._reservations.get(ticket)
        if promise is None or promise.state not in allowed:
            state = promise.state.value if promise else "unknown"
            raise BlockLedgerError(f"ticket {ticket} is {state}: it cannot become {after.value}")
        for block in promise.blocks:
            self._ownership.change_state(block, promise.state, after)
        promise.state, promise.since = after, self._clock()
        return promise

    def _end_reservation(
        self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState
    ) -> _TicketReservation:
        promise = self._change_ticket_state(ticket, allowed, after)
        del self._reservations[ticket]
        return promise

    def _free_reserved_blocks(self, promise: _TicketReservation) -> None:
        for block in promise.blocks:
            heappush(self._free, block)
