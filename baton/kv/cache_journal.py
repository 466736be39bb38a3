"""Changes of a node's prefix index that were not yet sent to the coordinator.

They feed the coordinator's prefix directory
(coordinator/core/membership/prefix_directory.py). An insertion and an eviction of the same block
cancel out before they are sent, so at most two changes per block are pending. Batches are numbered
from 1 in each incarnation, and the first is a snapshot. They are a hint: the node looks into its
index before it uses a block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.kv.blocks import BlockHash, short_hash

FLUSH_INTERVAL_SECONDS = 0.05  # between batches of a busy node
# 16 KiB in one batch, which keeps either end's event loop busy for a millisecond or two.
MAX_HASHES_PER_BATCH = 2048


@dataclass(frozen=True, slots=True)
class CacheEventBatch:
    """One message to the prefix directory."""

    sequence_number: int
    inserted_hashes: tuple[int, ...]  # short hashes
    evicted_hashes: tuple[int, ...]  # short hashes
    is_reset: bool  # this batch replaces everything that was sent before


class CacheJournal:
    """Collects insertions and evictions, and builds the batches and snapshots to send."""

    def __init__(self) -> None:
        self._pending: dict[int, bool] = {}  # in order; True: inserted, False: evicted
        self._is_snapshot_open = False  # between begin_snapshot and end_snapshot
        self._sequence = 0
        self._flushed_at: float | None = None

    def record_insertion(self, block_hash: BlockHash) -> None:
        self._record_change(short_hash(block_hash), present=True)

    def record_eviction(self, block_hash: BlockHash) -> None:
        self._record_change(short_hash(block_hash), present=False)

    def is_flush_due(self, now: float) -> bool:
        """Whether changes are pending and the flush interval has passed."""
        return bool(self._pending) and (
            self._flushed_at is None or now - self._flushed_at >= FLUSH_INTERVAL_SECONDS
        )

    def pop_events(self, now: float) -> Iterator[CacheEventBatch]:
        """Remove all pending changes and return them in batches of bounded size."""
        changes, self._pending, self._flushed_at = self._pending, {}, now
        hashes = list(changes)
        for start in range(0, len(hashes), MAX_HASHES_PER_BATCH):
            part = hashes[start : start + MAX_HASHES_PER_BATCH]
            inserted = tuple(short for short in part if changes[short])
            evicted = tuple(short for short in part if not changes[short])
            yield self._next_batch(inserted, evicted, is_reset=False)

    def build_snapshot(self, hashes: Iterable[BlockHash], now: float) -> Iterator[CacheEventBatch]:
        """Return batches of the whole index, `hashes`. Pending changes are part of it already."""
        self._pending, self._flushed_at, self._is_snapshot_open = {}, now, False
        indexed = [short_hash(block_hash) for block_hash in hashes]
        for start in range(0, max(1, len(indexed)), MAX_HASHES_PER_BATCH):
            yield self._next_batch(
                tuple(indexed[start : start + MAX_HASHES_PER_BATCH]), (), is_reset=start == 0
            )

    def begin_snapshot(self) -> None:
        """Begin a snapshot that is built in parts, each from the index as it is at that time.

        Changes in the meantime are sent as events between the parts. Until `end_snapshot` an
        insertion and an eviction of the same block do not cancel out, because what the coordinator
        knows of a block depends on whether its part was already sent.
        """
        self._pending, self._is_snapshot_open = {}, True

    def build_snapshot_part(
        self, hashes: Iterable[BlockHash], now: float, *, first: bool
    ) -> CacheEventBatch:
        """Return the next part: at most MAX_HASHES_PER_BATCH hashes that are indexed now."""
        part = tuple(short_hash(block_hash) for block_hash in hashes)
        for indexed in part:
            self._pending.pop(indexed, None)
        self._flushed_at = now
        return self._next_batch(part, (), is_reset=first)

    def end_snapshot(self, now: float) -> Iterator[CacheEventBatch]:
        """End the snapshot and return the changes since the parts they belong to were built."""
        self._is_snapshot_open = False
        return self.pop_events(now)

    def restart_numbering(self) -> None:
        """Number from 1 again, for a new incarnation. The next batch must be a snapshot."""
        self._sequence = 0

    def _record_change(self, changed: int, *, present: bool) -> None:
        if not self._is_snapshot_open and self._pending.get(changed) is (not present):
            del self._pending[changed]
        else:
            self._pending[changed] = present

    def _next_batch(
        self, inserted: tuple[int, ...], evicted: tuple[int, ...], *, is_reset: bool
    ) -> CacheEventBatch:
        self._sequence += 1
        return CacheEventBatch(self._sequence, inserted, evicted, is_reset)
