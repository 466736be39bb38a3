"""Who may touch which block of the arena. Pure bookkeeping: no memory is read or written here.

    FREE --allocate------------------------------------------> IN_USE --last release--> CACHED  or FREE
    FREE --reserve--> RESERVED --mark_writing--> WRITING --commit-^ ^----- match, share ---- CACHED
                         |                          |                                       CACHED --evict--> FREE
                         +------------+-------------+
                                      +--release_ticket--> FREE
                                      +--quarantine------> QUARANTINED --fenced--> FREE

After its last release a block is CACHED if it is sealed (full, or the end of somebody's context) and the only one with
its content, else FREE. Every reference is held under an owner's label, once per (owner, block): releasing what one
does not hold is an error, and the ledger can name everybody. Running out of blocks is an answer (None); an illegal
transition is a LedgerError.

Eviction is least recently used first. `release` takes a sequence's blocks in table order and retires them last first,
and whoever holds a block holds its whole prefix; so a parent retires after its children and is evicted after them: no
cached block is stranded behind an evicted parent. (If a caller breaks that order, the stranded block is not found
until its parent is computed again.)
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.block_hash import BlockHash, block_hash
from baton.hash_chain import HashChain
from baton.types import BlockIndex, TicketId
from node_engine.core.block_accounts import BlockAccounts
from node_engine.core.cache_journal import CacheJournal
from node_engine.core.ledger import BlockState, Ledger, LedgerEntry, LedgerError, require
from node_engine.core.prefix_index import IndexedBlock, PrefixIndex


@dataclass(frozen=True, slots=True)
class PartialHit:
    """The first `num_tokens` tokens of `source` are what the next block begins with: copy it, then go on in the
    copy."""

    source: BlockIndex
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the pool holds of a context; the owner has a reference on every block named here, `partial.source`
    included."""

    blocks: tuple[BlockIndex, ...]
    partial: PartialHit | None
    num_tokens: int  # covered by `blocks` and `partial` together


@dataclass(slots=True)
class _Promise:
    """The blocks of a ticket that has not committed."""

    owner: str
    blocks: tuple[BlockIndex, ...]
    state: BlockState
    since: float


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Called on the compute thread only; `clock` gives the ledger's
    ages."""

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        self.total = num_blocks
        self.block_size = block_size
        self.journal = CacheJournal()
        self.index = PrefixIndex(self._gained, self._lost)
        self._clock = clock
        self._accounts = BlockAccounts(num_blocks, clock)
        self._free = [BlockIndex(block) for block in range(num_blocks)]  # a heap: lowest first keeps runs together
        self._cached: OrderedDict[BlockIndex, None] = OrderedDict()  # least recently used first
        self._promises: dict[TicketId, _Promise] = {}

    # what there is

    @property
    def available(self) -> int:
        """Blocks that an allocation can get now, by eviction if need be."""
        return len(self._free) + len(self._cached)

    def state(self, block: BlockIndex) -> BlockState:
        return self._accounts.state(block)

    def refs(self, block: BlockIndex) -> int:
        """Owners of a block that is IN_USE, else 0."""
        return self._accounts.refs(block)

    def count(self, state: BlockState) -> int:
        return self._accounts.count(state)

    def counts(self) -> dict[BlockState, int]:
        return self._accounts.counts()

    def held_by(self, owner: str) -> int:
        """Blocks on which `owner` has a reference."""
        return self._accounts.held_by(owner)

    # local work

    def allocate(self, count: int, owner: str) -> tuple[BlockIndex, ...] | None:
        """`count` blocks for `owner`, ascending; None, and nothing changed, if there are not that many."""
        blocks = self._take(count)
        if blocks is None:
            return None
        for block in blocks:
            self._accounts.move(block, BlockState.FREE, BlockState.IN_USE)
            self._accounts.hold(block, owner)
        return blocks

    def share(self, blocks: Iterable[BlockIndex], owner: str) -> None:
        """One more owner for blocks that are IN_USE or CACHED."""
        for block in blocks:
            if self.state(block) is BlockState.CACHED:
                del self._cached[block]
                self._accounts.move(block, BlockState.CACHED, BlockState.IN_USE)
            elif self.state(block) is not BlockState.IN_USE:
                raise LedgerError(f"block {block} is {self.state(block).value}: only committed blocks are shared")
            self._accounts.hold(block, owner)

    def release(self, blocks: Sequence[BlockIndex], owner: str) -> None:
        """Give up `owner`'s reference on each of `blocks`, which come in table order."""
        for block in reversed(blocks):
            if self._accounts.let_go(block, owner):
                self._retire(block)

    # prefixes

    def match_prefix(self, chain: HashChain, max_tokens: int, owner: str, *, allow_partial: bool = True) -> PrefixMatch:
        """The longest beginning of `chain.tokens`, at most `max_tokens` long, whose KV is here; references are
        taken."""
        blocks = self._find_blocks(chain, max_tokens)
        covered = len(blocks) * self.block_size
        partial: PartialHit | None = None
        if allow_partial:
            rest = chain.tokens[covered : min(max_tokens, covered + self.block_size)]
            found = self.index.find_beginning(chain.parent(len(blocks)), rest) if rest else None
            partial = PartialHit(*found) if found else None
        self.share((*blocks, partial.source) if partial else blocks, owner)
        return PrefixMatch(tuple(blocks), partial, covered + (partial.num_tokens if partial else 0))

    def seal_block(self, block: BlockIndex, chain: HashChain, number: int, length: int | None = None) -> None:
        """`block` is logical block `number` of `chain`, computed and committed: make it findable. With `length` only
        its first tokens, so many: its owner goes on writing behind them, and seals the block again when it is full.

        Of blocks with equal content the first stays the one that is found; a CACHED one makes way for one in use.
        """
        if self.state(block) is not BlockState.IN_USE:
            raise LedgerError(f"block {block} is {self.state(block).value}: only a block in use is sealed")
        tokens = chain.block_tokens(number)[:length]
        if block in self.index:
            if len(self.index.entry(block).tokens) >= len(tokens):
                raise LedgerError(f"block {block} was sealed before")
            self.index.remove(block)
        name = chain.name(number) if length is None else block_hash(chain.parent(number), tokens)
        twins = self.index.twins(name)
        if twins and self.state(twins[0]) is BlockState.CACHED:
            self._evict(twins[0])
        self.index.add(block, IndexedBlock(name, chain.parent(number), tokens))

    def full_blocks(self) -> Iterator[BlockHash]:
        """Of every full block that can be found, each content once."""
        return (entry.hash for entry in self.index.contents() if len(entry.tokens) == self.block_size)

    # hand-offs

    def reserve(self, count: int, ticket: TicketId, owner: str) -> tuple[BlockIndex, ...] | None:
        """`count` blocks for the writer of `ticket`, ascending; None, and nothing changed, if there are not that
        many."""
        if ticket in self._promises or count < 1:
            raise LedgerError(f"ticket {ticket}: {count} blocks, or it is known already")
        blocks = self._take(count)
        if blocks is None:
            return None
        for block in blocks:
            self._accounts.move(block, BlockState.FREE, BlockState.RESERVED)
        self._promises[ticket] = _Promise(owner, blocks, BlockState.RESERVED, self._clock())
        return blocks

    def mark_writing(self, ticket: TicketId) -> None:
        """The writer has begun."""
        self._advance(ticket, (BlockState.RESERVED,), BlockState.WRITING)

    def commit(self, ticket: TicketId) -> tuple[BlockIndex, ...]:
        """Everything has landed and the writer is gone: the blocks are the owner's."""
        promise = self._end(ticket, (BlockState.WRITING,), BlockState.IN_USE)
        for block in promise.blocks:
            self._accounts.hold(block, promise.owner)
        return promise.blocks

    def release_ticket(self, ticket: TicketId) -> None:
        """The hand-off is lost and its writer is fenced."""
        self._free_all(self._end(ticket, (BlockState.RESERVED, BlockState.WRITING), BlockState.FREE))

    def quarantine(self, ticket: TicketId) -> None:
        """The hand-off is lost, but its writer may still write."""
        self._advance(ticket, (BlockState.RESERVED, BlockState.WRITING), BlockState.QUARANTINED)

    def fenced(self, ticket: TicketId) -> None:
        """Proof is in hand that the writer of a quarantined ticket writes no more."""
        self._free_all(self._end(ticket, (BlockState.QUARANTINED,), BlockState.FREE))

    # account

    def ledger(self) -> Ledger:
        now = self._clock()
        promised = (
            LedgerEntry(promise.owner, promise.state, len(promise.blocks), now - promise.since, ticket)
            for ticket, promise in self._promises.items()
        )
        return Ledger(self.total, self.counts(), (*self._accounts.entries(), *promised))

    def check(self) -> None:
        """Raise LedgerError unless every count and every cross-reference agrees. Looks at everything: for tests."""
        self._accounts.check()
        self.index.check()
        require(sum(self.counts().values()) == self.total, "the states do not add up to all blocks")
        free, promises = set(self._free), list(self._promises.values())
        require(len(free) == len(self._free), "a block is on the free list twice")
        promised = {block: promise.state for promise in promises for block in promise.blocks}
        require(len(promised) == sum(len(promise.blocks) for promise in promises), "a block is promised twice")
        for number in range(self.total):
            block = BlockIndex(number)
            state = self.state(block)
            require((block in free) == (state is BlockState.FREE), f"block {block} is {state}: free list")
            require((block in self._cached) == (state is BlockState.CACHED), f"block {block} is {state}: cache")
            if state in (BlockState.RESERVED, BlockState.WRITING, BlockState.QUARANTINED):
                require(promised.pop(block, None) is state, f"block {block} is {state}: no such ticket")
            if block in self.index:
                twins = self.index.twins(self.index.entry(block).hash)
                require(state is BlockState.IN_USE or len(twins) == 1, f"block {block} is {state}: indexed")
                require(state in (BlockState.IN_USE, BlockState.CACHED), f"block {block} is {state}: indexed")
            else:
                require(state is not BlockState.CACHED, f"block {block} is cached, but nobody can find it")
        require(not promised, "a ticket names blocks of another state")

    # the steps underneath

    def _gained(self, entry: IndexedBlock) -> None:
        if len(entry.tokens) == self.block_size:
            self.journal.gained(entry.hash)

    def _lost(self, entry: IndexedBlock) -> None:
        if len(entry.tokens) == self.block_size:
            self.journal.lost(entry.hash)

    def _find_blocks(self, chain: HashChain, max_tokens: int) -> list[BlockIndex]:
        blocks: list[BlockIndex] = []
        for number in range(min(max_tokens, len(chain.tokens)) // self.block_size):
            block = self.index.find(chain.name(number), chain.parent(number), chain.block_tokens(number))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _take(self, count: int) -> tuple[BlockIndex, ...] | None:
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict(next(iter(self._cached)))
        return tuple(heappop(self._free) for _ in range(count))

    def _evict(self, block: BlockIndex) -> None:
        del self._cached[block]
        self.index.remove(block)
        self._accounts.move(block, BlockState.CACHED, BlockState.FREE)
        heappush(self._free, block)

    def _retire(self, block: BlockIndex) -> None:
        """The last reference is gone: keep the block as cache if nobody else holds the same content."""
        if block in self.index and len(self.index.twins(self.index.entry(block).hash)) == 1:
            self._accounts.move(block, BlockState.IN_USE, BlockState.CACHED)
            self._cached[block] = None
            return
        if block in self.index:
            self.index.remove(block)
        self._accounts.move(block, BlockState.IN_USE, BlockState.FREE)
        heappush(self._free, block)

    def _advance(self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState) -> _Promise:
        promise = self._promises.get(ticket)
        if promise is None or promise.state not in allowed:
            state = promise.state.value if promise else "unknown"
            raise LedgerError(f"ticket {ticket} is {state}: it cannot become {after.value}")
        for block in promise.blocks:
            self._accounts.move(block, promise.state, after)
        promise.state, promise.since = after, self._clock()
        return promise

    def _end(self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState) -> _Promise:
        promise = self._advance(ticket, allowed, after)
        del self._promises[ticket]
        return promise

    def _free_all(self, promise: _Promise) -> None:
        for block in promise.blocks:
            heappush(self._free, block)
