"""What a node records of its blocks: states, owners and contents.

Every reference on a block belongs to an owner with a label, so the block ledger, a balanced
snapshot, names the owner of every block.

The prefix index finds blocks by content: a hash index for whole blocks, sorted siblings for partial
matches. A block is found by its BlockHash, which covers its whole prefix. Its tokens and its parent
hash are compared as well, so that a hash collision cannot return the wrong KV. The token tuples of
all children of one parent are kept sorted: the child with the longest common prefix is then a
neighbour of the insertion point of the requested tokens (binary search).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.kv.blocks import BlockHash
from baton.types import BlockIndex, TicketId


class BlockState(Enum):
    """States of a block of the arena; `BlockPool` owns the transitions."""

    FREE = "free"
    RESERVED = "reserved"  # set aside for the KV writer of a ticket
    WRITING = "writing"  # the KV writer has begun
    IN_USE = "in_use"  # referenced by at least one owner
    CACHED = "cached"  # no references, in the prefix index; evictable
    QUARANTINED = "quarantined"  # the hand-off failed, but its KV writer may still write


class BlockLedgerError(AssertionError):
    """An illegal transition or a ledger that does not balance: a bug in Baton, not bad input."""


def require_invariant(holds: bool, what: str) -> None:
    """Raise BlockLedgerError unless `holds`. Unlike an assert, it also runs under `python -O`."""
    if not holds:
        raise BlockLedgerError(f"the block ledger is inconsistent: {what}")


@dataclass(frozen=True, slots=True)
class BlockLedgerEntry:
    """The blocks of one owner in one state."""

    owner: str  # the label under which the references were taken
    state: BlockState
    num_blocks: int
    # Since the owner got its first block or, for a ticket, since the last change of state.
    age_seconds: float
    # The permission of another node to write these blocks, in a hand-off; None for blocks IN_USE.
    ticket_id: TicketId | None = None


@dataclass(frozen=True, slots=True)
class BlockLedger:
    """A snapshot of all blocks, by state and by owner.

    A shared block is counted in the entry of each of its owners, so IN_USE entries may add up to
    more than `counts[IN_USE]`. Entries in other states count each block once.
    """

    num_blocks: int
    counts: Mapping[BlockState, int]
    entries: tuple[BlockLedgerEntry, ...]

    @property
    def is_balanced(self) -> bool:
        return sum(self.counts.values()) == self.num_blocks and min(self.counts.values()) >= 0


@dataclass(slots=True)
class _OwnerBlocks:
    since: float  # clock time, in seconds, of the first reference
    blocks: set[BlockIndex] = field(default_factory=set)


class BlockOwnership:
    """The state of each block and the references that owners hold on it.

    An owner holds at most one reference on a block, so a second release is detected and the ledger
    can name every owner.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._states = [BlockState.FREE] * num_blocks
        self._counts_by_state = dict.fromkeys(BlockState, 0) | {BlockState.FREE: num_blocks}
        self._ref_counts = [0] * num_blocks
        self._blocks_by_owner: dict[str, _OwnerBlocks] = {}

    def remove_free_blocks(self, first: int) -> None:
        """Stop tracking the blocks from `first` on, which must all be FREE."""
        removed = self._states[first:]
        if any(state is not BlockState.FREE for state in removed):
            raise BlockLedgerError(f"a block from {first} on is not free, and cannot be removed")
        del self._states[first:]
        del self._ref_counts[first:]
        self._counts_by_state[BlockState.FREE] -= len(removed)

    def get_block_state(self, block: BlockIndex) -> BlockState:
        return self._states[block]

    def get_ref_count(self, block: BlockIndex) -> int:
        return self._ref_counts[block]

    def count_blocks(self, state: BlockState) -> int:
        return self._counts_by_state[state]

    def count_blocks_by_state(self) -> dict[BlockState, int]:
        return dict(self._counts_by_state)

    def count_blocks_held_by(self, owner: str) -> int:
        holding = self._blocks_by_owner.get(owner)
        return len(holding.blocks) if holding else 0

    def change_state(self, block: BlockIndex, before: BlockState, after: BlockState) -> None:
        if self._states[block] is not before:
            raise BlockLedgerError(
                f"block {block} is {self._states[block].value}, not {before.value}"
            )
        self._states[block] = after
        self._counts_by_state[before] -= 1
        self._counts_by_state[after] += 1

    def change_states(
        self, blocks: Sequence[BlockIndex], before: BlockState, after: BlockState
    ) -> None:
        """Change the state of many blocks, each named once, or of none if one is in another."""
        states = self._states
        for block in blocks:
            if states[block] is not before:
                raise BlockLedgerError(
                    f"block {block} is {states[block].value}, not {before.value}"
                )
        for block in blocks:
            states[block] = after
        self._counts_by_state[before] -= len(blocks)
        self._counts_by_state[after] += len(blocks)

    def add_references(self, blocks: Sequence[BlockIndex], owner: str) -> None:
        """Add a reference on each of the blocks, of which the owner holds none."""
        if not blocks:
            return
        holding = self._blocks_by_owner.get(owner) or _OwnerBlocks(self._clock())
        if len(set(blocks)) != len(blocks) or not holding.blocks.isdisjoint(blocks):
            raise BlockLedgerError(f"{owner} already holds one of the blocks {blocks}")
        holding.blocks.update(blocks)
        self._blocks_by_owner[owner] = holding
        for block in blocks:
            self._ref_counts[block] += 1

    def remove_reference(self, block: BlockIndex, owner: str) -> bool:
        """Remove a reference; returns whether it was the last one on the block."""
        holding = self._blocks_by_owner.get(owner)
        if holding is None or block not in holding.blocks:
            raise BlockLedgerError(
                f"{owner} does not hold block {block}, which is {self._states[block].value}"
            )
        holding.blocks.remove(block)
        if not holding.blocks:
            del self._blocks_by_owner[owner]
        self._ref_counts[block] -= 1
        return self._ref_counts[block] == 0

    def iter_ledger_entries(self) -> Iterator[BlockLedgerEntry]:
        now = self._clock()
        for owner, holding in self._blocks_by_owner.items():
            yield BlockLedgerEntry(
                owner, BlockState.IN_USE, len(holding.blocks), now - holding.since
            )

    def check_invariants(self) -> None:
        refs = [0] * len(self._states)
        for owner, holding in self._blocks_by_owner.items():
            require_invariant(bool(holding.blocks), f"owner {owner} holds no block")
            for block in holding.blocks:
                refs[block] += 1
        require_invariant(
            refs == self._ref_counts, "references differ from the blocks that owners hold"
        )
        for number, state in enumerate(self._states):
            require_invariant(
                (refs[number] > 0) == (state is BlockState.IN_USE),
                f"{refs[number]} owners of a {state} block",
            )
        require_invariant(
            {state: self._states.count(state) for state in BlockState} == self._counts_by_state,
            "counts by state",
        )


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """The content of a block: its tokens after the prefix that `parent_hash` names."""

    block_hash: BlockHash
    parent_hash: BlockHash
    token_ids: tuple[int, ...]


def _ignore_entry(entry: IndexedBlock) -> None:
    """Default listener."""


class PrefixIndex:
    """Blocks by content.

    Several blocks may hold the same content (*duplicates*). Look-ups return the first one; when it
    is removed, the next one takes its place.
    """

    def __init__(
        self,
        on_content_added: Callable[[IndexedBlock], None] = _ignore_entry,
        on_content_removed: Callable[[IndexedBlock], None] = _ignore_entry,
    ) -> None:
        """The callbacks receive each content that becomes findable or stops being findable."""
        self._on_content_added, self._on_content_removed = on_content_added, on_content_removed
        self._entries: dict[BlockIndex, IndexedBlock] = {}
        self._blocks_by_hash: dict[BlockHash, list[BlockIndex]] = {}
        # Tokens and hashes of the blocks that follow a parent, by parent hash, sorted.
        self._children: dict[BlockHash, list[tuple[tuple[int, ...], BlockHash]]] = {}

    def __contains__(self, block: BlockIndex) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get_entry(self, block: BlockIndex) -> IndexedBlock:
        return self._entries[block]

    def list_blocks_with_hash(self, block_hash: BlockHash) -> Sequence[BlockIndex]:
        """Blocks with this hash; the first one is the one that look-ups return."""
        return self._blocks_by_hash.get(block_hash, ())

    def add_block(self, block: BlockIndex, entry: IndexedBlock) -> None:
        """Make `block` findable. Ignored if another content already has the same hash."""
        duplicates = self._blocks_by_hash.setdefault(entry.block_hash, [])
        if duplicates and self._entries[duplicates[0]] != entry:
            return
        if not duplicates:
            insort(
                self._children.setdefault(entry.parent_hash, []),
                (entry.token_ids, entry.block_hash),
            )
            self._on_content_added(entry)
        duplicates.append(block)
        self._entries[block] = entry

    def remove_block(self, block: BlockIndex) -> None:
        entry = self._entries.pop(block)
        duplicates = self._blocks_by_hash[entry.block_hash]
        duplicates.remove(block)
        if duplicates:
            return
        del self._blocks_by_hash[entry.block_hash]
        siblings = self._children[entry.parent_hash]
        del siblings[bisect_left(siblings, (entry.token_ids, entry.block_hash))]
        if not siblings:
            del self._children[entry.parent_hash]
        self._on_content_removed(entry)

    def iter_contents(self) -> Iterator[IndexedBlock]:
        """Every indexed content, each once."""
        return (self._entries[duplicates[0]] for duplicates in self._blocks_by_hash.values())

    def iter_full_block_hashes(self, block_size: int) -> Iterator[BlockHash]:
        """Hashes of all blocks of `block_size` tokens, each content once."""
        return (
            entry.block_hash for entry in self.iter_contents() if len(entry.token_ids) == block_size
        )

    def find_block(
        self, block_hash: BlockHash, parent_hash: BlockHash, tokens: Sequence[int]
    ) -> BlockIndex | None:
        """The block that holds exactly `tokens` after the prefix `parent_hash`."""
        duplicates = self._blocks_by_hash.get(block_hash)
        if duplicates is None:
            return None
        entry = self._entries[duplicates[0]]
        return (
            duplicates[0]
            if entry.parent_hash == parent_hash and entry.token_ids == tuple(tokens)
            else None
        )

    def find_partial_match(
        self, parent_hash: BlockHash, tokens: Sequence[int]
    ) -> tuple[BlockIndex, int] | None:
        """The child of `parent_hash` that shares the most leading tokens with `tokens`.

        Returns the block and the number of shared tokens, or None if no child shares any.
        """
        siblings = self._children.get(parent_hash, [])
        requested = tuple(tokens)
        position = bisect_left(siblings, (requested,))
        best: tuple[BlockIndex, int] | None = None
        for candidate, block_hash in siblings[max(0, position - 1) : position + 1]:
            shared = common_prefix_length(candidate, requested)
            if shared > (best[1] if best else 0):
                best = (self._blocks_by_hash[block_hash][0], shared)
        return best

    def check_invariants(self) -> None:
        """Raise BlockLedgerError if the three tables do not agree."""
        require_invariant(
            sum(len(duplicates) for duplicates in self._blocks_by_hash.values())
            == len(self._entries),
            "indexed blocks",
        )
        for block_hash, duplicates in self._blocks_by_hash.items():
            require_invariant(
                len(set(duplicates)) == len(duplicates) > 0, f"duplicates {duplicates}"
            )
            require_invariant(
                {self._entries[block].block_hash for block in duplicates} == {block_hash},
                f"hash of {duplicates}",
            )
            require_invariant(
                len({self._entries[block] for block in duplicates}) == 1, f"content of {duplicates}"
            )
        require_invariant(
            sum(len(siblings) for siblings in self._children.values()) == len(self._blocks_by_hash),
            "children",
        )
        for parent, siblings in self._children.items():
            require_invariant(siblings == sorted(siblings), "order of siblings")
            for tokens, block_hash in siblings:
                entry = self._entries[self._blocks_by_hash[block_hash][0]]
                require_invariant(
                    (entry.parent_hash, entry.token_ids) == (parent, tokens),
                    "a child under the wrong parent",
                )


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for position, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if ours != theirs:
            return position
    return min(len(left), len(right))
