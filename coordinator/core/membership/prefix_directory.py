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

`PoolRegistry` has the shared pools of hosts as members: they send reports like nodes, but get no
attempts. The blocks of a pool are available to every node of its host.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from baton.cluster_link.messages import PROTOCOL_VERSION, PoolJoinInfo
from baton.cluster_link.report_types import NodeStats
from baton.errors import ConfigError, NodeLost
from baton.models.model_identity import ModelIdentity
from baton.types import Incarnation, PeerAddress
from coordinator.core.membership.join_checks import (
    MAX_NAME_LENGTH,
    require_free_name,
    require_process_nonce,
)

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


@dataclass(slots=True)
class PoolMember:
    """One membership of a pool, from a join to the loss of its connection."""

    info: PoolJoinInfo
    incarnation: Incarnation
    joined_at: float
    heard_at: float
    stats: NodeStats | None = None  # None until its first heartbeat

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.info.name, self.incarnation, self.info.host_id, self.info.endpoint)


class PoolRegistry:
    """All pools that are members; `silence` in seconds."""

    def __init__(self, silence: float) -> None:
        self.members: dict[Incarnation, PoolMember] = {}
        self._silence = silence

    def check_join(
        self, info: PoolJoinInfo, model: ModelIdentity | None, now: float
    ) -> PoolMember | None:
        """Check whether the pool may join nodes that serve `model`; return the member it would
        replace.

        Raises ConfigError naming the first field that differs; one with `retry_after` may go away
        with time.
        """
        _require_equal(info, "protocol_version", info.protocol_version, PROTOCOL_VERSION)
        if not 0 < len(info.name) <= MAX_NAME_LENGTH or not info.name.isprintable():
            raise ConfigError(
                f"pool name {info.name!r} must be 1 to {MAX_NAME_LENGTH} printable characters:"
                " set --name"
            )
        require_process_nonce(info)
        if info.num_blocks < 1:
            raise ConfigError(
                f"pool {info.name!r} has num_blocks {info.num_blocks}: it must be at least 1"
            )
        if model is not None:
            _require_equal(info, "model_digest", info.model_digest, model.model_digest)
            _require_equal(info, "layout", info.layout, model.layout)
        holder = next((one for one in self.members.values() if one.info.name == info.name), None)
        if holder is not None:
            require_free_name(info, holder.info, free_in=holder.heard_at + self._silence - now)
        return holder

    def add_pool(self, info: PoolJoinInfo, incarnation: Incarnation, now: float) -> None:
        self.members[incarnation] = PoolMember(info, incarnation, joined_at=now, heard_at=now)

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(pool.info.host_id for pool in self.members.values())

    def find_expired(self, now: float) -> list[tuple[PoolMember, NodeLost]]:
        """Return the silent pools."""
        return [
            (one, NodeLost(f"pool {one.info.name} was silent for {now - one.heard_at:.1f} s"))
            for one in self.members.values()
            if now - one.heard_at >= self._silence
        ]

    def next_silence_at(self) -> float | None:
        """Return when the first pool would count as silent."""
        return min((one.heard_at + self._silence for one in self.members.values()), default=None)


def _require_equal(info: PoolJoinInfo, field: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise ConfigError(
            f"pool {info.name!r} has {field} {theirs!r}, the cluster has {ours!r}", param=field
        )
