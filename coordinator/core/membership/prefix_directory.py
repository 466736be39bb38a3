"""Tracks which node's cache has which block, by cache events: a hint that may be stale.

A node looks into its own index before it uses a block, so a wrong entry costs a computation and
nothing else. Keys are short hashes, the first 8 bytes of block hashes, each of which identifies a
whole prefix. For every hash there is one integer with a bit for each node that has it. So a prompt
is looked up for all nodes at once, block by block, until no node has the next block. An event costs
O(1) a hash, a look-up O(blocks found + nodes), whatever the size of the directory.

Events of a node are numbered. When one is missing, the node's entries are kept, though they may be
stale, further events are ignored, and the caller is told to ask for a snapshot; again if none has
arrived after `SNAPSHOT_TIMEOUT_SECONDS`.

A node that leaves, or sends a new snapshot, gives up its bit at once. Entries with that bit mean
nothing from then on and are swept a slice at a time: a pool's million of them would block the event
loop for half a second. Tables are sharded by hash, because growing a table copies it, and copying a
million entries takes long as well.

`CachedPrefixes` asks the directory which nodes have cached the beginning of a prompt, and which
pools of other hosts have more of it. Such a pool is named in the order to the node, so that the
node's own pool can fetch the blocks instead of computing them.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from baton.kv.blocks import HashChain, root_hash, short_hash
from baton.types import Incarnation, Request
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.membership.pool_registry import PoolMember, PoolRegistry

SNAPSHOT_TIMEOUT_SECONDS = 1.0  # after which a snapshot is asked for again
SWEEP_SLICE = 4096  # hashes that are swept at a time
SHARD_COUNT = 64
_RETIRED = Incarnation("")  # owner of a slot whose bit is still in entries


@dataclass(slots=True)
class _NodeCache:
    """The known blocks of one node."""

    slot: int
    max_blocks: int
    hash_shards: list[set[int]] = field(default_factory=lambda: [set() for _ in range(SHARD_COUNT)])
    block_count: int = 0  # blocks in all shards
    last_sequence: int = 0  # number of its last event
    is_synced: bool = False  # events count only after a snapshot
    snapshot_asked_at: float | None = None  # set while a snapshot is awaited


class PrefixDirectory:
    """Maps short block hashes to the nodes that have them."""

    def __init__(self) -> None:
        self.resync_count = 0  # snapshots that were asked for
        self._node_bits: list[dict[int, int]] = [
            {} for _ in range(SHARD_COUNT)
        ]  # by block hash: one bit for each node
        self._caches: dict[Incarnation, _NodeCache] = {}
        self._slots: list[Incarnation | None] = []
        self._live_bits = 0  # the bits of all nodes
        self._retired: deque[tuple[int, Iterator[int]]] = (
            deque()
        )  # slots, and the hashes that still have their bits

    def __len__(self) -> int:
        """Return the number of hashes, including those that await the sweep."""
        return sum(map(len, self._node_bits))

    def get_block_hashes(self, node: Incarnation) -> frozenset[int]:
        return frozenset(chain.from_iterable(self._caches[node].hash_shards))

    def add_node(self, node: Incarnation, capacity: int) -> None:
        """Add a node; more than `capacity` blocks of it are ignored."""
        self._caches[node] = _NodeCache(self._assign_slot(node), capacity)

    def remove_node(self, node: Incarnation) -> None:
        cache = self._caches.pop(node, None)
        if cache is not None:
            self._retire_cache(cache)

    def sweep_slice(self) -> bool:
        """Sweep up to SWEEP_SLICE retired entries; return whether there are more."""
        left = SWEEP_SLICE
        while self._retired and left:
            slot, names = self._retired[0]
            before = left
            for name in islice(names, before):
                self._clear_bit(name, 1 << slot)
                left -= 1
            if left:
                self._retired.popleft()
                self._slots[slot] = None
        return bool(self._retired)

    @property
    def needs_sweep(self) -> bool:
        return bool(self._retired)

    def apply_events(
        self,
        node: Incarnation,
        sequence: int,
        inserted: Iterable[int],
        evicted: Iterable[int],
        now: float,
    ) -> bool:
        """Apply the events; return whether to ask the node for a snapshot. A hash in both lists
        counts as inserted."""
        cache = self._caches[node]
        if sequence <= cache.last_sequence and cache.is_synced:  # again
            return False
        if not cache.is_synced or sequence != cache.last_sequence + 1:
            cache.is_synced = False
            return self._should_request_snapshot(cache, now)
        cache.last_sequence = sequence
        self._evict(cache, evicted)
        self._insert(cache, inserted)
        return False

    def apply_snapshot(self, node: Incarnation, sequence: int, names: Iterable[int]) -> None:
        """Replace the node's entries by a snapshot, or its first part; late ones are dropped."""
        cache = self._caches[node]
        if sequence <= cache.last_sequence:
            return
        cache.last_sequence, cache.is_synced, cache.snapshot_asked_at = sequence, True, None
        if cache.block_count:
            self._retire_cache(cache)
            fresh = self._caches[node] = _NodeCache(
                self._assign_slot(node), cache.max_blocks, last_sequence=sequence, is_synced=True
            )
            cache = fresh
        self._insert(cache, names)

    def match_prefix(self, names: Iterable[int]) -> dict[Incarnation, int]:
        """Return how many leading blocks of a prompt each node has, without a gap. Nodes that lack
        the first block are left out. `names` is read only as far as some node has the blocks."""
        found: dict[Incarnation, int] = {}
        depth, holders, have = 0, self._node_bits, self._live_bits
        for name in names:
            still = have & holders[name % SHARD_COUNT].get(name, 0)
            if depth and still != have:
                self._set_depths(found, have & ~still, depth)
            have = still
            if not have:
                return found
            depth += 1
        if depth:
            self._set_depths(found, have, depth)
        return found

    def _set_depths(self, found: dict[Incarnation, int], bits: int, depth: int) -> None:
        while bits:
            lowest = bits & -bits
            node = self._slots[lowest.bit_length() - 1]
            if node is not None:
                found[node] = depth
            bits ^= lowest

    def _insert(self, cache: _NodeCache, names: Iterable[int]) -> None:
        bit = 1 << cache.slot
        for name in names:
            if cache.block_count >= cache.max_blocks:
                return
            shard = name % SHARD_COUNT
            mine, holders = cache.hash_shards[shard], self._node_bits[shard]
            if name not in mine:
                mine.add(name)
                cache.block_count += 1
                holders[name] = holders.get(name, 0) | bit

    def _evict(self, cache: _NodeCache, names: Iterable[int]) -> None:
        """Remove those of the hashes that the node has."""
        for name in names:
            mine = cache.hash_shards[name % SHARD_COUNT]
            if name in mine:
                mine.remove(name)
                cache.block_count -= 1
                self._clear_bit(name, 1 << cache.slot)

    def _clear_bit(self, name: int, bit: int) -> None:
        holders = self._node_bits[name % SHARD_COUNT]
        left = holders[name] & ~bit
        if left:
            holders[name] = left
        else:
            del holders[name]

    def _assign_slot(self, node: Incarnation) -> int:
        slot = self._slots.index(None) if None in self._slots else len(self._slots)
        self._slots[slot : slot + 1] = [node]
        self._live_bits |= 1 << slot
        return slot

    def _retire_cache(self, cache: _NodeCache) -> None:
        """Invalidate all entries of the node; a few of them are swept at once."""
        self._live_bits &= ~(1 << cache.slot)
        self._slots[cache.slot] = _RETIRED
        few = cache.block_count < SWEEP_SLICE and not self._retired
        self._retired.append((cache.slot, _drain_shards(cache.hash_shards)))
        if few:
            self.sweep_slice()

    def _should_request_snapshot(self, cache: _NodeCache, now: float) -> bool:
        if (
            cache.snapshot_asked_at is not None
            and now - cache.snapshot_asked_at < SNAPSHOT_TIMEOUT_SECONDS
        ):
            return False
        cache.snapshot_asked_at = now
        self.resync_count += 1
        return True


def _drain_shards(shards: list[set[int]]) -> Iterator[int]:
    """Yield all hashes, and free each shard as soon as it was read."""
    while shards:
        yield from shards.pop()


MIN_EXTRA_BLOCKS = 4  # below this the request to the pool costs more than it saves


def best_remote_pool(
    found: Mapping[Incarnation, int], pools: Iterable[PoolMember], host: str, here: int
) -> tuple[PoolMember, int] | None:
    """Return the pool of another host with the most blocks of a prompt, and how many.

    None unless it has MIN_EXTRA_BLOCKS more than `here`, the blocks on `host`. Of equal pools the
    one that joined first is chosen.
    """
    there = [
        (found.get(pool.incarnation, 0), -pool.joined_at, pool)
        for pool in pools
        if pool.info.host_id != host
    ]
    if not there:
        return None
    blocks, _, pool = max(there, key=lambda one: one[:2])
    return (pool, blocks) if blocks - here >= MIN_EXTRA_BLOCKS else None


class PromptBlockHashes:
    """The short hashes of a prompt's full blocks, computed on demand and at most once."""

    def __init__(self, chain: HashChain) -> None:
        self._hash_chain = chain
        self._hashes: list[int] = []

    @property
    def block_size(self) -> int:
        return self._hash_chain.block_size

    def __iter__(self) -> Iterator[int]:
        """Yield the short hashes of the full blocks, from the first one on."""
        for block in range(len(self._hash_chain.tokens) // self._hash_chain.block_size):
            if block == len(self._hashes):
                self._hashes.append(short_hash(self._hash_chain.block_hash(block)))
            yield self._hashes[block]


class CachedPrefixes:
    """Finds which nodes and pools seem to have the beginning of a prompt in their caches."""

    def __init__(
        self, registry: NodeRegistry, directory: PrefixDirectory, pools: PoolRegistry
    ) -> None:
        self._registry = registry
        self._directory = directory
        self._pools = pools

    def hash_prompt(self, request: Request) -> PromptBlockHashes:
        """Return the block hashes of the prompt. Valid only after the first join."""
        model = self._registry.model_identity
        assert model is not None, "no node has joined"
        root = root_hash(bytes.fromhex(model.model_digest), model.layout, request.cache_salt)
        return PromptBlockHashes(HashChain(root, request.prompt_token_ids, model.layout.block_size))

    def cached_tokens_by_node(self, block_hashes: PromptBlockHashes) -> dict[Incarnation, int]:
        """Return the prompt tokens that each node's cache, or its host's pool, seems to have."""
        held = self._reachable_blocks(self._directory.match_prefix(block_hashes))
        return {node: blocks * block_hashes.block_size for node, blocks in held.items()}

    def find_remote_prefixes(
        self, block_hashes: PromptBlockHashes, nodes: Iterable[Incarnation]
    ) -> dict[Incarnation, tuple[PoolMember, int]]:
        """For each of `nodes` whose host has a pool and less of the prompt than another host's
        pool: return that pool and how many tokens it seems to have."""
        pools = self._pools.members.values()
        if len(pools) < 2 or len(hosts := self._pools.hosts) < 2:
            return {}
        found = self._directory.match_prefix(block_hashes)
        held = self._reachable_blocks(found)
        remote: dict[Incarnation, tuple[PoolMember, int]] = {}
        for node in nodes:
            host = self._registry.nodes[node].info.host_id
            there = (
                best_remote_pool(found, pools, host, held.get(node, 0)) if host in hosts else None
            )
            if there is not None:
                remote[node] = (there[0], there[1] * block_hashes.block_size)
        return remote

    def _reachable_blocks(self, found: Mapping[Incarnation, int]) -> dict[Incarnation, int]:
        """Return the blocks that each node can reach: its own or its host's pool's."""
        held = dict(found)
        pooled: dict[str, int] = {}  # by host
        for pool in self._pools.members.values():
            blocks = held.pop(pool.incarnation, 0)
            if blocks:
                pooled[pool.info.host_id] = max(blocks, pooled.get(pool.info.host_id, 0))
        for node in self._registry.nodes.values() if pooled else ():
            blocks = pooled.get(node.info.host_id, 0)
            if blocks > held.get(node.incarnation, 0):
                held[node.incarnation] = blocks
        return held
