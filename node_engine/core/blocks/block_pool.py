"""Allocation, reference counts and prefix cache of a node's KV blocks. No memory is touched here.

    FREE --allocate_blocks--> IN_USE --last release_blocks--> CACHED, or FREE if not cacheable
    CACHED --match_prefix, share_blocks--> IN_USE
    CACHED --evicted or unindexed--> FREE

ticket_reservations.py has the other states: those of blocks that another node writes.

After its last release a block becomes CACHED if it is in the prefix index (it is full, or holds the
end of a context) and no other block has the same content; otherwise it becomes FREE. An owner holds
at most one reference on a block: releasing a block that the owner does not hold is an error, and
the ledger can name every owner. Running out of blocks is reported as None; an illegal transition
raises BlockLedgerError.

Eviction is least recently used first. `release_blocks` takes a sequence's blocks in table order and
retires them last first, and whoever references a block references its whole prefix. A parent is
therefore retired and evicted after its children, and no cached block is unreachable behind an
evicted parent. (If a caller breaks that order, the unreachable block is not found until its parent
is computed again.)

Block tables may also contain blocks of the host's shared pool: global indices from `num_blocks` on
(baton/shared_memory/addressing.py). They are not tracked here: sharing and releasing them does
nothing.

A node may serve while the memory of its cache is still being allocated. Blocks without memory are
FREE, and a block gets memory before it leaves that state. If there is no more memory, the blocks
without are removed, and the pool is smaller from then on.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from baton.kv.blocks import HashChain, block_hash
from baton.kv.cache_journal import CacheJournal
from baton.types import BlockIndex
from node_engine.core.blocks.block_records import (
    BlockLedger,
    BlockLedgerError,
    BlockOwnership,
    BlockState,
    IndexedBlock,
    PrefixIndex,
    require_invariant,
)
from node_engine.core.blocks.ticket_reservations import TicketReservations


@dataclass(frozen=True, slots=True)
class PartialHit:
    """The next block begins with the first `num_tokens` tokens of `source_block`: copy on write."""

    source_block: BlockIndex
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached prefix of a context.

    The owner holds a reference on every block of this arena in it, `partial_hit.source_block`
    included.
    """

    blocks: tuple[BlockIndex, ...]
    partial_hit: PartialHit | None
    num_tokens: int  # covered by `blocks` and `partial_hit` together


# Called with a number of blocks. Ensures that so many blocks, from block 0 on, have memory; returns
# how many have, which is less than requested only if no other will ever have any.
BackBlocks = Callable[[int], int]


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Called on the compute thread only."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float],
        back_blocks: BackBlocks | None = None,
    ) -> None:
        """`back_blocks` gives blocks their memory; None if all have it."""
        self.num_blocks = num_blocks
        self._back_blocks = back_blocks
        self._num_backed = num_blocks if back_blocks is None else back_blocks(0)
        self.block_size = block_size
        self.cache_journal = CacheJournal()
        self.prefix_index = PrefixIndex(self._on_block_indexed, self._on_block_unindexed)
        self.ownership = BlockOwnership(num_blocks, clock)
        self.reservations = TicketReservations(
            self.ownership, clock, self._take_free_blocks, self._return_free_blocks
        )
        # A heap: taking the lowest first keeps the blocks of a sequence contiguous.
        self._free = [BlockIndex(block) for block in range(num_blocks)]
        self._cached_lru: OrderedDict[BlockIndex, None] = OrderedDict()  # least recently used first

    # queries

    @property
    def num_available_blocks(self) -> int:
        """Blocks that an allocation can get now, by eviction if necessary."""
        return len(self._free) + len(self._cached_lru)

    def is_own_block(self, block: BlockIndex) -> bool:
        """Whether `block` belongs to this arena, not to the shared pool."""
        return block < self.num_blocks

    # allocation

    def allocate_blocks(self, count: int, owner: str) -> tuple[BlockIndex, ...] | None:
        """Give `owner` `count` blocks, ascending; None, without any change, if too few are left."""
        blocks = self._take_free_blocks(count)
        if blocks is None:
            return None
        self.ownership.change_states(blocks, BlockState.FREE, BlockState.IN_USE)
        self.ownership.add_references(blocks, owner)
        return blocks

    def share_blocks(self, blocks: Iterable[BlockIndex], owner: str) -> None:
        """Add `owner` as an owner of blocks that are IN_USE or CACHED."""
        own = [block for block in blocks if self.is_own_block(block)]
        for block in own:
            if self.ownership.get_block_state(block) is BlockState.CACHED:
                del self._cached_lru[block]
                self.ownership.change_state(block, BlockState.CACHED, BlockState.IN_USE)
            elif self.ownership.get_block_state(block) is not BlockState.IN_USE:
                raise BlockLedgerError(
                    f"block {block} is {self.ownership.get_block_state(block).value}:"
                    " only committed blocks can be shared"
                )
        self.ownership.add_references(own, owner)

    def release_blocks(self, blocks: Sequence[BlockIndex], owner: str) -> None:
        """Remove `owner`'s reference on each of `blocks`, which are given in table order."""
        for block in reversed(blocks):
            if self.is_own_block(block) and self.ownership.remove_reference(block, owner):
                self._retire_block(block)

    def remove_unbacked_blocks(self) -> None:
        """Remove the blocks without memory: there is none for them."""
        if self._back_blocks is None:
            return
        self.num_blocks = self._num_backed = min(self.num_blocks, self._back_blocks(0))
        self.ownership.remove_free_blocks(self.num_blocks)
        self._free = [block for block in self._free if block < self.num_blocks]
        heapify(self._free)

    # prefixes

    def match_prefix(
        self,
        chain: HashChain,
        max_tokens: int,
        owner: str,
        *,
        allow_partial: bool = True,
        pool_blocks: Sequence[BlockIndex] = (),
    ) -> PrefixMatch:
        """Find the longest cached prefix of `chain.tokens`, at most `max_tokens` long.

        `pool_blocks` are the blocks 0, 1, ... of the chain that the shared pool has; blocks of this
        arena are preferred, and `owner` gets a reference on those.
        """
        blocks = self._find_blocks(chain, max_tokens, pool_blocks)
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
        """Index `block`, which holds logical block `number` of `chain`, computed and committed.

        With `length`, only the first `length` tokens are indexed: the owner goes on writing behind
        them and indexes the block again when it is full. Of blocks with equal content, look-ups
        keep returning the first; a CACHED one is evicted in favour of one in use.
        """
        if self.ownership.get_block_state(block) is not BlockState.IN_USE:
            raise BlockLedgerError(
                f"block {block} is {self.ownership.get_block_state(block).value}:"
                " only a block in use can be indexed"
            )
        tokens = chain.block_tokens(number)[:length]
        if block in self.prefix_index:
            if len(self.prefix_index.get_entry(block).token_ids) >= len(tokens):
                raise BlockLedgerError(f"block {block} was indexed before")
            self.prefix_index.remove_block(block)
        content_hash = (
            chain.block_hash(number)
            if length is None
            else block_hash(chain.parent_hash(number), tokens)
        )
        duplicates = self.prefix_index.list_blocks_with_hash(content_hash)
        if duplicates and self.ownership.get_block_state(duplicates[0]) is BlockState.CACHED:
            self._evict_block(duplicates[0])
        self.prefix_index.add_block(
            block, IndexedBlock(content_hash, chain.parent_hash(number), tokens)
        )

    def find_own_suffix(self, chain: HashChain, end: int) -> tuple[BlockIndex, ...]:
        """The longest gap-free run of this arena's blocks that ends at logical block `end` - 1."""
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
        """Remove `block` from the prefix index: it is freed now, or with its last release."""
        if self.ownership.get_block_state(block) is BlockState.CACHED:
            self._evict_block(block)
        else:
            self.prefix_index.remove_block(block)

    # ledger

    def take_ledger(self) -> BlockLedger:
        """A snapshot of all blocks by state and by owner."""
        return BlockLedger(
            self.num_blocks,
            self.ownership.count_blocks_by_state(),
            (*self.ownership.iter_ledger_entries(), *self.reservations.iter_ledger_entries()),
        )

    def check_invariants(self) -> None:
        """Raise BlockLedgerError unless all counts and cross-references agree. Slow: for tests."""
        self.ownership.check_invariants()
        self.prefix_index.check_invariants()
        self.reservations.check_invariants()
        require_invariant(
            sum(self.ownership.count_blocks_by_state().values()) == self.num_blocks,
            "the counts by state do not add up to all blocks",
        )
        free = set(self._free)
        require_invariant(len(free) == len(self._free), "a block is on the free list twice")
        for number in range(self.num_blocks):
            block = BlockIndex(number)
            state = self.ownership.get_block_state(block)
            require_invariant(
                (block in free) == (state is BlockState.FREE),
                f"block {block} is {state}: free list",
            )
            require_invariant(
                block < self._num_backed or state is BlockState.FREE,
                f"block {block} is {state} and has no memory",
            )
            require_invariant(
                (block in self._cached_lru) == (state is BlockState.CACHED),
                f"block {block} is {state}: cache",
            )
            self._check_index_of_block(block, state)

    # helpers

    def _check_index_of_block(self, block: BlockIndex, state: BlockState) -> None:
        if block not in self.prefix_index:
            require_invariant(
                state is not BlockState.CACHED,
                f"block {block} is cached, but not in the prefix index",
            )
            return
        duplicates = self.prefix_index.list_blocks_with_hash(
            self.prefix_index.get_entry(block).block_hash
        )
        require_invariant(
            state is BlockState.IN_USE or (state is BlockState.CACHED and len(duplicates) == 1),
            f"block {block} is {state}: indexed",
        )

    def _on_block_indexed(self, entry: IndexedBlock) -> None:
        if len(entry.token_ids) == self.block_size:
            self.cache_journal.record_insertion(entry.block_hash)

    def _on_block_unindexed(self, entry: IndexedBlock) -> None:
        if len(entry.token_ids) == self.block_size:
            self.cache_journal.record_eviction(entry.block_hash)

    def _find_blocks(
        self, chain: HashChain, max_tokens: int, pool_blocks: Sequence[BlockIndex]
    ) -> list[BlockIndex]:
        blocks: list[BlockIndex] = []
        for number in range(min(max_tokens, len(chain.tokens)) // self.block_size):
            block = self.prefix_index.find_block(
                chain.block_hash(number), chain.parent_hash(number), chain.block_tokens(number)
            )
            if block is None and number < len(pool_blocks):
                block = pool_blocks[number]
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take_free_blocks(self, count: int) -> tuple[BlockIndex, ...] | None:
        if count > self.num_available_blocks:
            return None
        while len(self._free) < count:
            self._evict_block(next(iter(self._cached_lru)))
        blocks = tuple(heappop(self._free) for _ in range(count))
        if blocks and blocks[-1] >= self._num_backed and not self._require_memory(blocks[-1]):
            self._return_free_blocks(blocks)
            self.remove_unbacked_blocks()
            return self._take_free_blocks(count)
        return blocks

    def _require_memory(self, block: BlockIndex) -> bool:
        """Give memory to the blocks up to `block`; False if there is too little."""
        if self._back_blocks is not None:
            self._num_backed = self._back_blocks(block + 1)
        return block < self._num_backed

    def _return_free_blocks(self, blocks: Iterable[BlockIndex]) -> None:
        for block in blocks:
            heappush(self._free, block)

    def _evict_block(self, block: BlockIndex) -> None:
        del self._cached_lru[block]
        self.prefix_index.remove_block(block)
        self.ownership.change_state(block, BlockState.CACHED, BlockState.FREE)
        heappush(self._free, block)

    def _retire_block(self, block: BlockIndex) -> None:
        """The last reference is gone: cache the block if no other block has the same content."""
        if (
            block in self.prefix_index
            and len(
                self.prefix_index.list_blocks_with_hash(
                    self.prefix_index.get_entry(block).block_hash
                )
            )
            == 1
        ):
            self.ownership.change_state(block, BlockState.IN_USE, BlockState.CACHED)
            self._cached_lru[block] = None
            return
        if block in self.prefix_index:
            self.prefix_index.remove_block(block)
        self.ownership.change_state(block, BlockState.IN_USE, BlockState.FREE)
        heappush(self._free, block)
