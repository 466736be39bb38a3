"""Which node's cache has which block, as far as the nodes have told: a hint that may be stale and is never trusted.

A node looks into its own index before it uses anything, so a block that is missing costs a computation and nothing
else. Names are the first 8 bytes of BlockHashes, which name a whole prefix each. For every name there is one integer,
a bit for each node that has it; so a prompt is looked up for all nodes at once, block by block, until the last of them
has dropped out. An event costs O(1) a name, a look-up O(blocks found + nodes), whatever the size of the directory.

Events of a node are numbered. When one is missing, what is known of the node is kept (stale, as it may be), events are
left aside, and the caller is told to ask for a snapshot; it is told again if none has come after `PATIENCE`.

A node that leaves, or tells anew all that it has, gives up its bit at once. The entries with that bit mean nothing from
then on, and are swept a slice at a time: a pool's million of them would hold the event loop for half a second. Tables
are split into SHARDS by name, because a table that grows is copied, and copying a million entries takes long as well.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from baton.types import Incarnation

PATIENCE = 1.0  # seconds
SLICE = 4096  # names that are swept at a time
SHARDS = 64
_SWEPT = Incarnation("")  # has a slot whose bit is still in entries


@dataclass(slots=True)
class _Cache:
    """What one node has told. `last` is the number of its last event; `asked_at`: a snapshot is being waited for."""

    slot: int
    capacity: int
    names: list[set[int]] = field(default_factory=lambda: [set() for _ in range(SHARDS)])
    count: int = 0  # of them
    last: int = 0
    in_step: bool = False  # nothing counts before the first snapshot
    asked_at: float | None = None


class PrefixDirectory:
    def __init__(self) -> None:
        self.resyncs = 0  # snapshots that were asked for
        self._holders: list[dict[int, int]] = [{} for _ in range(SHARDS)]  # name -> a bit for each node, by slot
        self._caches: dict[Incarnation, _Cache] = {}
        self._by_slot: list[Incarnation | None] = []
        self._all = 0  # the bits of all nodes
        self._given_up: deque[tuple[int, Iterator[int]]] = deque()  # slots, and the names that still have their bits

    def __len__(self) -> int:
        """Different blocks, those that are to be swept included."""
        return sum(map(len, self._holders))

    def blocks_of(self, node: Incarnation) -> frozenset[int]:
        return frozenset(chain.from_iterable(self._caches[node].names))

    def join(self, node: Incarnation, capacity: int) -> None:
        """`capacity` in blocks: more than so many are not believed."""
        self._caches[node] = _Cache(self._take_slot(node), capacity)

    def leave(self, node: Incarnation) -> None:
        cache = self._caches.pop(node, None)
        if cache is not None:
            self._give_up(cache)

    def sweep(self) -> bool:
        """Take up to SLICE entries of those who have left, or told anew, away. Whether there are more."""
        left = SLICE
        while self._given_up and left:
            slot, names = self._given_up[0]
            before = left
            for name in islice(names, before):
                self._drop(name, 1 << slot)
                left -= 1
            if left:
                self._given_up.popleft()
                self._by_slot[slot] = None
        return bool(self._given_up)

    @property
    def is_to_sweep(self) -> bool:
        return bool(self._given_up)

    def events(
        self, node: Incarnation, sequence: int, inserted: Iterable[int], evicted: Iterable[int], now: float
    ) -> bool:
        """Whether to ask the node for a snapshot. Of names that stand in both, the insertion counts."""
        cache = self._caches[node]
        if sequence <= cache.last and cache.in_step:  # again
            return False
        if not cache.in_step or sequence != cache.last + 1:
            cache.in_step = False
            return self._is_to_ask(cache, now)
        cache.last = sequence
        self._evict(cache, evicted)
        self._insert(cache, inserted)
        return False

    def snapshot(self, node: Incarnation, sequence: int, names: Iterable[int]) -> None:
        """All that the node has, or the first part of it; late ones are dropped."""
        cache = self._caches[node]
        if sequence <= cache.last:
            return
        cache.last, cache.in_step, cache.asked_at = sequence, True, None
        if cache.count:
            self._give_up(cache)
            fresh = self._caches[node] = _Cache(self._take_slot(node), cache.capacity, last=sequence, in_step=True)
            cache = fresh
        self._insert(cache, names)

    def match(self, names: Iterable[int]) -> dict[Incarnation, int]:
        """How many of `names`, the blocks of a prompt in order, each node has, from the first one on without a gap.
        Nodes that lack the first are left out. `names` is read no further than somebody has it."""
        found: dict[Incarnation, int] = {}
        depth, holders, have = 0, self._holders, self._all
        for name in names:
            still = have & holders[name % SHARDS].get(name, 0)
            if depth and still != have:
                self._add(found, have & ~still, depth)
            have = still
            if not have:
                return found
            depth += 1
        if depth:
            self._add(found, have, depth)
        return found

    def _add(self, found: dict[Incarnation, int], bits: int, depth: int) -> None:
        while bits:
            lowest = bits & -bits
            node = self._by_slot[lowest.bit_length() - 1]
            if node is not None:
                found[node] = depth
            bits ^= lowest

    def _insert(self, cache: _Cache, names: Iterable[int]) -> None:
        bit = 1 << cache.slot
        for name in names:
            if cache.count >= cache.capacity:
                return
            shard = name % SHARDS
            mine, holders = cache.names[shard], self._holders[shard]
            if name not in mine:
                mine.add(name)
                cache.count += 1
                holders[name] = holders.get(name, 0) | bit

    def _evict(self, cache: _Cache, names: Iterable[int]) -> None:
        """Those of `names` that are the node's."""
        for name in names:
            mine = cache.names[name % SHARDS]
            if name in mine:
                mine.remove(name)
                cache.count -= 1
                self._drop(name, 1 << cache.slot)

    def _drop(self, name: int, bit: int) -> None:
        holders = self._holders[name % SHARDS]
        left = holders[name] & ~bit
        if left:
            holders[name] = left
        else:
            del holders[name]

    def _take_slot(self, node: Incarnation) -> int:
        slot = self._by_slot.index(None) if None in self._by_slot else len(self._by_slot)
        self._by_slot[slot : slot + 1] = [node]
        self._all |= 1 << slot
        return slot

    def _give_up(self, cache: _Cache) -> None:
        """What the node has told means nothing any more. A few entries are swept at once."""
        self._all &= ~(1 << cache.slot)
        self._by_slot[cache.slot] = _SWEPT
        few = cache.count < SLICE and not self._given_up
        self._given_up.append((cache.slot, _taken_apart(cache.names)))
        if few:
            self.sweep()

    def _is_to_ask(self, cache: _Cache, now: float) -> bool:
        if cache.asked_at is not None and now - cache.asked_at < PATIENCE:
            return False
        cache.asked_at = now
        self.resyncs += 1
        return True


def _taken_apart(shards: list[set[int]]) -> Iterator[int]:
    """All names; each set is freed when it has been read, and not all of them in the end."""
    while shards:
        yield from shards.pop()
