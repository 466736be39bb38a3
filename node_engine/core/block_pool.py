"""Who may touch which block of the arena. Pure bookkeeping: no memory is read or written here.

    FREE --allocate--------------------------> IN_USE --last release--> CACHED   full, hashed, the only one of its kind
    FREE --reserve--> RESERVED                   ^  |                  > FREE     otherwise
                         | mark_writing          |  +-- share, match: one more owner
                         v                       |
                      WRITING --commit-----------+      CACHED --match--> IN_USE, --evict--> FREE
    RESERVED | WRITING --release_ticket--> FREE  |  --quarantine--> QUARANTINED --fenced--> FREE

Every reference is held under an owner's label, once per (owner, block): releasing what one does not hold is
an error, and the ledger can name everybody. Running out of blocks is an answer (None); an illegal transition
is a LedgerError.

Eviction is least recently used first. `release` takes a sequence's blocks in table order and retires them
last first, and whoever holds a block holds its whole prefix; so a parent always retires after its children
and is evicted after them: no cached block is ever stranded behind an evicted parent.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from baton.types import BlockIndex, TicketId
from node_engine.core.hash_chain import HashChain
from node_engine.core.ledger import BlockState, Ledger, LedgerEntry, LedgerError
from node_engine.core.prefix_index import IndexedBlock, PrefixIndex


@dataclass(frozen=True, slots=True)
class PartialHit:
    """The first `num_tokens` tokens of `source` are what the next block begins with: copy it, then go on in
    the copy."""

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
class _Holding:
    since: float
    blocks: set[BlockIndex] = field(default_factory=set)


@dataclass(slots=True)
class _Promise:
    """The blocks of a ticket that has not committed."""

    owner: str
    blocks: tuple[BlockIndex, ...]
    state: BlockState
    since: float


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Called on the compute thread only; `clock` gives the
    ledger's ages."""

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float]) -> None:
        self.total = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex()
        self._clock = clock
        self._state = [BlockState.FREE] * num_blocks
        self._refs = [0] * num_blocks
        self._count = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._free = [BlockIndex(block) for block in range(num_blocks)]  # a heap: lowest first keeps runs together
        self._cached: OrderedDict[BlockIndex, None] = OrderedDict()  # least recently used first
        self._holdings: dict[str, _Holding] = {}
        self._promises: dict[TicketId, _Promise] = {}

    # what there is

    @property
    def available(self) -> int:
        """Blocks that an allocation can get now, by eviction if need be."""
        return len(self._free) + len(self._cached)

    def count(self, state: BlockState) -> int:
        return self._count[state]

    def counts(self) -> dict[BlockState, int]:
        return dict(self._count)

    def held_by(self, owner: str) -> int:
        holding = self._holdings.get(owner)
        return len(holding.blocks) if holding else 0

    # local work

    def allocate(self, count: int, owner: str) -> tuple[BlockIndex, ...] | None:
        """`count` blocks for `owner`, ascending; None, and nothing changed, if there are not that many."""
        blocks = self._take(count)
        if blocks is None:
            return None
        for block in blocks:
            self._move(block, BlockState.FREE, BlockState.IN_USE)
        self._hold(blocks, owner)
        return blocks

    def share(self, blocks: Iterable[BlockIndex], owner: str) -> None:
        """One more owner for blocks that are IN_USE or CACHED."""
        shared = tuple(blocks)
        for block in shared:
            if self._state[block] is BlockState.CACHED:
                del self._cached[block]
                self._move(block, BlockState.CACHED, BlockState.IN_USE)
            elif self._state[block] is not BlockState.IN_USE:
                raise LedgerError(f"block {block} is {self._state[block].value}: only committed blocks are shared")
        self._hold(shared, owner)

    def release(self, blocks: Sequence[BlockIndex], owner: str) -> None:
        """Give up `owner`'s reference on each of `blocks`, which come in table order."""
        holding = self._holdings.get(owner)
        for block in reversed(blocks):
            if holding is None or block not in holding.blocks:
                raise LedgerError(f"{owner} does not hold block {block} ({self._state[block].value})")
            holding.blocks.remove(block)
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._retire(block)
        if holding is not None and not holding.blocks:
            del self._holdings[owner]

    # prefixes

    def match_prefix(self, chain: HashChain, max_tokens: int, owner: str, *, allow_partial: bool = True) -> PrefixMatch:
        """The longest beginning of `chain.tokens`, at most `max_tokens` long, whose KV is here; references
        are taken."""
        blocks = self._find_blocks(chain, max_tokens)
        covered = len(blocks) * self.block_size
        partial: PartialHit | None = None
        if allow_partial:
            rest = chain.tokens[covered : min(max_tokens, covered + self.block_size)]
            found = self.index.find_beginning(chain.parent(len(blocks)), rest) if rest else None
            partial = PartialHit(*found) if found else None
        self.share((*blocks, partial.source) if partial else blocks, owner)
        return PrefixMatch(tuple(blocks), partial, covered + (partial.num_tokens if partial else 0))

    def peek_prefix(self, chain: HashChain, max_tokens: int) -> int:
        """How many tokens `match_prefix` would cover with whole blocks; takes no reference."""
        return len(self._find_blocks(chain, max_tokens)) * self.block_size

    def seal_block(self, block: BlockIndex, chain: HashChain, number: int) -> None:
        """`block` is full, computed and committed, and is logical block `number` of `chain`: make it
        findable.

        Of blocks with equal content the first stays the one that is found; a CACHED one makes way for one in
        use.
        """
        if self._state[block] is not BlockState.IN_USE:
            raise LedgerError(f"block {block} is {self._state[block].value}: only a block in use is sealed")
        if block in self.index:
            raise LedgerError(f"block {block} was sealed before")
        name = chain.name(number)
        for twin in tuple(self.index.twins(name)):
            if self._state[twin] is BlockState.CACHED:
                self._evict(twin)
        self.index.add(block, IndexedBlock(name, chain.parent(number), chain.block_tokens(number)))

    # hand-offs

    def reserve(self, count: int, ticket: TicketId, owner: str) -> tuple[BlockIndex, ...] | None:
        """`count` blocks for the writer of `ticket`, ascending; None, and nothing changed, if there are not
        that many."""
        if ticket in self._promises or count < 1:
            raise LedgerError(f"ticket {ticket}: {count} blocks, or it is known already")
        blocks = self._take(count)
        if blocks is None:
            return None
        for block in blocks:
            self._move(block, BlockState.FREE, BlockState.RESERVED)
        self._promises[ticket] = _Promise(owner, blocks, BlockState.RESERVED, self._clock())
        return blocks

    def mark_writing(self, ticket: TicketId) -> None:
        """The writer has begun."""
        self._advance(ticket, (BlockState.RESERVED,), BlockState.WRITING)

    def commit(self, ticket: TicketId) -> tuple[BlockIndex, ...]:
        """Everything has landed and the writer is gone: the blocks are the owner's."""
        promise = self._end(ticket, (BlockState.WRITING,), BlockState.IN_USE)
        self._hold(promise.blocks, promise.owner)
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
        held = (
            LedgerEntry(owner, BlockState.IN_USE, len(holding.blocks), now - holding.since)
            for owner, holding in self._holdings.items()
        )
        promised = (
            LedgerEntry(promise.owner, promise.state, len(promise.blocks), now - promise.since, ticket)
            for ticket, promise in self._promises.items()
        )
        return Ledger(self.total, self.counts(), (*held, *promised))

    def check(self) -> None:
        """Raise LedgerError unless every count and every cross-reference agrees. Looks at everything: for
        tests."""
        try:
            self._check()
        except AssertionError as error:
            raise LedgerError(f"the block ledger does not balance: {error or 'see the traceback'}") from error

    def _check(self) -> None:
        refs = [0] * self.total
        for owner, holding in self._holdings.items():
            assert holding.blocks, f"{owner} holds nothing"
            for block in holding.blocks:
                refs[block] += 1
        assert refs == self._refs, "references"
        promised = {block: promise.state for promise in self._promises.values() for block in promise.blocks}
        assert len(promised) == sum(len(promise.blocks) for promise in self._promises.values()), "promised twice"
        assert len(set(self._free)) == len(self._free), "free twice"
        free = set(self._free)
        for number, state in enumerate(self._state):
            block = BlockIndex(number)
            assert (block in free) == (state is BlockState.FREE), f"free list, block {block}"
            assert (block in self._cached) == (state is BlockState.CACHED), f"cached list, block {block}"
            assert (refs[block] > 0) == (state is BlockState.IN_USE), f"references of block {block}"
            if state not in (BlockState.FREE, BlockState.CACHED, BlockState.IN_USE):
                assert promised.pop(block, None) is state, f"ticket of block {block}"
            if block in self.index:
                assert state in (BlockState.CACHED, BlockState.IN_USE), f"indexed block {block}"
            if state is BlockState.CACHED:
                assert len(self.index.twins(self.index.entry(block).hash)) == 1, f"cached twin {block}"
        assert not promised, "promised but not in state"
        assert {state: self._state.count(state) for state in BlockState} == self._count, "counts"
        assert sum(self._count.values()) == self.total, "total"
        self.index.check()

    # the steps underneath

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
        self._move(block, BlockState.CACHED, BlockState.FREE)
        heappush(self._free, block)

    def _retire(self, block: BlockIndex) -> None:
        """The last reference is gone: keep the block as cache if nobody else holds the same content."""
        if block in self.index and len(self.index.twins(self.index.entry(block).hash)) == 1:
            self._move(block, BlockState.IN_USE, BlockState.CACHED)
            self._cached[block] = None
            return
        if block in self.index:
            self.index.remove(block)
        self._move(block, BlockState.IN_USE, BlockState.FREE)
        heappush(self._free, block)

    def _hold(self, blocks: Iterable[BlockIndex], owner: str) -> None:
        holding = self._holdings.get(owner)
        for block in blocks:
            if holding is None:
                holding = self._holdings[owner] = _Holding(self._clock())
            if block in holding.blocks:
                raise LedgerError(f"{owner} holds block {block} already")
            holding.blocks.add(block)
            self._refs[block] += 1

    def _move(self, block: BlockIndex, before: BlockState, after: BlockState) -> None:
        if self._state[block] is not before:
            raise LedgerError(f"block {block} is {self._state[block].value}, not {before.value}")
        self._state[block] = after
        self._count[before] -= 1
        self._count[after] += 1

    def _advance(self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState) -> _Promise:
        promise = self._promises.get(ticket)
        if promise is None or promise.state not in allowed:
            state = promise.state.value if promise else "unknown"
            raise LedgerError(f"ticket {ticket} is {state}: it cannot become {after.value}")
        for block in promise.blocks:
            self._move(block, promise.state, after)
        promise.state, promise.since = after, self._clock()
        return promise

    def _end(self, ticket: TicketId, allowed: tuple[BlockState, ...], after: BlockState) -> _Promise:
        promise = self._advance(ticket, allowed, after)
        del self._promises[ticket]
        return promise

    def _free_all(self, promise: _Promise) -> None:
        for block in promise.blocks:
            heappush(self._free, block)
