"""What the prefix index has gained and lost since the coordinator was last told.

The coordinator keeps a directory of who holds what
(coordinator/core/membership/prefix_directory.py), and this is its source. A change and its opposite
cancel each other out before anybody hears of them, so what is pending is never more than the blocks
there are, twice. Messages are numbered from 1 for each incarnation, and the first is a snapshot.
They are a hint: the node itself looks into its index before it uses anything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.kv.block_hash import BlockHash, short_hash

FLUSH_INTERVAL_SECONDS = 0.05  # seconds between messages of a node at work
# in one message, 16 KiB: what either end's event loop does for it takes a millisecond or two
MAX_HASHES_PER_BATCH = 2048


@dataclass(frozen=True, slots=True)
class CacheEventBatch:
    """One message. `is_reset`: what was told before is void."""

    sequence_number: int
    inserted_hashes: tuple[int, ...]
    evicted_hashes: tuple[int, ...]
    is_reset: bool


class CacheJournal:
    def __init__(self) -> None:
        self._pending: dict[int, bool] = {}  # True: gained, False: lost; in order
        self._is_snapshot_open = False  # a snapshot is being told in parts
        self._sequence = 0
        self._flushed_at: float | None = None

    def record_insertion(self, name: BlockHash) -> None:
        self._record_change(short_hash(name), present=True)

    def record_eviction(self, name: BlockHash) -> None:
        self._record_change(short_hash(name), present=False)

    def is_flush_due(self, now: float) -> bool:
        """Is there something to tell, and has enough time passed?"""
        return bool(self._pending) and (
            self._flushed_at is None or now - self._flushed_at >= FLUSH_INTERVAL_SECONDS
        )

    def pop_events(self, now: float) -> Iterator[CacheEventBatch]:
        """Everything that is pending, in messages of bounded size."""
        changes, self._pending, self._flushed_at = self._pending, {}, now
        names = list(changes)
        for start in range(0, len(names), MAX_HASHES_PER_BATCH):
            part = names[start : start + MAX_HASHES_PER_BATCH]
            inserted = tuple(name for name in part if changes[name])
            evicted = tuple(name for name in part if not changes[name])
            yield self._next_batch(inserted, evicted, fresh=False)

    def build_snapshot(self, names: Iterable[BlockHash], now: float) -> Iterator[CacheEventBatch]:
        """`names` is all there is; what is pending is in it."""
        self._pending, self._flushed_at, self._is_snapshot_open = {}, now, False
        every = [short_hash(name) for name in names]
        for start in range(0, max(1, len(every)), MAX_HASHES_PER_BATCH):
            yield self._next_batch(
                tuple(every[start : start + MAX_HASHES_PER_BATCH]), (), fresh=start == 0
            )

    def begin_snapshot(self) -> None:
        """What was told before is void. All there is follows in parts, each as it is when it is
        told.

        What changes meanwhile is told as events, in between. Until `end_snapshot` a change and its
        opposite do not cancel each other out: what the coordinator knows of a name depends on
        whether its part has been told.
        """
        self._pending, self._is_snapshot_open = {}, True

    def build_snapshot_part(
        self, names: Iterable[BlockHash], now: float, *, first: bool
    ) -> CacheEventBatch:
        """At most MAX_NAMES, all of which are there now."""
        part = tuple(short_hash(name) for name in names)
        for name in part:
            self._pending.pop(name, None)
        self._flushed_at = now
        return self._next_batch(part, (), fresh=first)

    def end_snapshot(self, now: float) -> Iterator[CacheEventBatch]:
        """What has changed since its part was told."""
        self._is_snapshot_open = False
        return self.pop_events(now)

    def restart_numbering(self) -> None:
        """For a new incarnation, which begins with a snapshot."""
        self._sequence = 0

    def _record_change(self, name: int, *, present: bool) -> None:
        if not self._is_snapshot_open and self._pending.get(name) is (not present):
            del self._pending[name]
        else:
            self._pending[name] = present

    def _next_batch(
        self, inserted: tuple[int, ...], evicted: tuple[int, ...], *, fresh: bool
    ) -> CacheEventBatch:
        self._sequence += 1
        return CacheEventBatch(self._sequence, inserted, evicted, fresh)
