"""What the prefix index has gained and lost since the coordinator was last told.

The coordinator keeps a directory of who holds what (coordinator/core/prefix_directory.py), and this is its source. A
change and its opposite cancel each other out before anybody hears of them, so what is pending is never more than the
blocks there are, twice. Messages are numbered from 1 for each incarnation, and the first is a snapshot. They are a
hint: the node itself looks into its index before it uses anything.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from baton.block_hash import BlockHash, short_name

INTERVAL = 0.05  # seconds between messages of a node at work
MAX_NAMES = 2048  # in one message, 16 KiB: what either end's event loop does for it takes a millisecond or two


@dataclass(frozen=True, slots=True)
class CacheChange:
    """One message. `fresh`: what was told before is void."""

    sequence: int
    inserted: tuple[int, ...]
    evicted: tuple[int, ...]
    fresh: bool


class CacheJournal:
    def __init__(self) -> None:
        self._pending: dict[int, bool] = {}  # True: gained, False: lost; in order
        self._in_parts = False  # a snapshot is being told in parts
        self._sequence = 0
        self._told_at: float | None = None

    def gained(self, name: BlockHash) -> None:
        self._note(short_name(name), present=True)

    def lost(self, name: BlockHash) -> None:
        self._note(short_name(name), present=False)

    def is_due(self, now: float) -> bool:
        """Is there something to tell, and has enough time passed?"""
        return bool(self._pending) and (self._told_at is None or now - self._told_at >= INTERVAL)

    def take(self, now: float) -> Iterator[CacheChange]:
        """Everything that is pending, in messages of bounded size."""
        changes, self._pending, self._told_at = self._pending, {}, now
        names = list(changes)
        for start in range(0, len(names), MAX_NAMES):
            part = names[start : start + MAX_NAMES]
            inserted = tuple(name for name in part if changes[name])
            evicted = tuple(name for name in part if not changes[name])
            yield self._numbered(inserted, evicted, fresh=False)

    def take_snapshot(self, names: Iterable[BlockHash], now: float) -> Iterator[CacheChange]:
        """`names` is all there is; what is pending is in it."""
        self._pending, self._told_at, self._in_parts = {}, now, False
        every = [short_name(name) for name in names]
        for start in range(0, max(1, len(every)), MAX_NAMES):
            yield self._numbered(tuple(every[start : start + MAX_NAMES]), (), fresh=start == 0)

    def begin_snapshot(self) -> None:
        """What was told before is void. All there is follows in parts, each as it is when it is told.

        What changes meanwhile is told as events, in between. Until `end_snapshot` a change and its opposite do not
        cancel each other out: what the coordinator knows of a name depends on whether its part has been told.
        """
        self._pending, self._in_parts = {}, True

    def take_part(self, names: Iterable[BlockHash], now: float, *, first: bool) -> CacheChange:
        """At most MAX_NAMES, all of which are there now."""
        part = tuple(short_name(name) for name in names)
        for name in part:
            self._pending.pop(name, None)
        self._told_at = now
        return self._numbered(part, (), fresh=first)

    def end_snapshot(self, now: float) -> Iterator[CacheChange]:
        """What has changed since its part was told."""
        self._in_parts = False
        return self.take(now)

    def restart(self) -> None:
        """For a new incarnation, which begins with a snapshot."""
        self._sequence = 0

    def _note(self, name: int, *, present: bool) -> None:
        if not self._in_parts and self._pending.get(name) is (not present):
            del self._pending[name]
        else:
            self._pending[name] = present

    def _numbered(self, inserted: tuple[int, ...], evicted: tuple[int, ...], *, fresh: bool) -> CacheChange:
        self._sequence += 1
        return CacheChange(self._sequence, inserted, evicted, fresh)
