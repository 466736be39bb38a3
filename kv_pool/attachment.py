"""A node's attachment: the pool's segment mapped beside its own, and the byte of the fence file that it holds as long
as anything reads or writes there.

It is over when its stream breaks, and then takes no new user. Its last user, of before, unlocks the byte and lets the
mapping go: only then may the pool use what was pinned for something else.
"""

import threading
from pathlib import Path
from weakref import WeakValueDictionary

from baton.addressing import AddressSpace
from baton.errors import PeerGone
from baton.fence import WriterFences
from baton.pb.pool_pb2 import Attached, Found
from baton.pool_terms import PoolHit, PoolPin
from baton.types import BlockIndex
from kv_pool.block_rows import BlockRows

MISS = PoolHit(None, ())


class Mappings:
    """Pools' segments in the node's address space. Attachments to one segment share its mapping, which goes with the
    last of them."""

    def __init__(self, space: AddressSpace, folder: Path, block_bytes: int) -> None:
        self.folder = folder
        self._space = space
        self._block_bytes = block_bytes
        self._mapped: WeakValueDictionary[str, BlockRows] = WeakValueDictionary()

    def of(self, segment: str) -> tuple[BlockRows, int]:
        """Its rows, and the global block index of the first. It may take a while. Raises PeerGone, LayoutMismatch or
        ConfigError."""
        rows = self._mapped.get(segment)
        if rows is None:
            rows = self._mapped[segment] = BlockRows(self._space.attach(segment), self._block_bytes)
        return rows, self._space.map.span(segment).start


class Attachment:
    """Thread-safe. `number` counts those of this node."""

    def __init__(self, number: int, said: Attached, mappings: Mappings) -> None:
        """Lock, then map; it may take a while. Raises PeerGone, LayoutMismatch or ConfigError."""
        self.number = number
        self.rows: BlockRows | None
        self._fences = WriterFences(mappings.folder, said.segment)
        try:
            if not self._fences.take(said.fence):
                raise PeerGone(f"byte {said.fence} of segment {said.segment} is the pool's again: it took too long")
            self.rows, self._first = mappings.of(said.segment)
        except BaseException:
            self._fences.close()  # else nobody ever could: the pool would wait for its byte for as long as this lives
            raise
        self._lock = threading.Lock()
        self._pins: set[int] = set()
        self._copying = 0
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    @property
    def ended(self) -> bool:
        """Over and without users: the byte is unlocked."""
        return self.rows is None

    def hit(self, found: Found) -> PoolHit:
        """What the pool found, with its pin as a user. A miss if the attachment is over."""
        if not found.pin:
            return MISS
        with self._lock:
            if self._over:
                return MISS
            self._pins.add(found.pin)
        blocks = tuple(BlockIndex(self._first + block) for block in found.blocks)
        partial = (BlockIndex(self._first + found.partial_block), found.partial_tokens)
        return PoolHit(PoolPin(self.number, found.pin), blocks, partial if found.partial_tokens else None, found.remote)

    def release(self, pin: PoolPin) -> bool:
        """Whether the pool is to be told. Raises ValueError for a pin that is not held."""
        with self._lock:
            if pin.number not in self._pins:
                raise ValueError(f"{pin} is released and not held")
            self._pins.remove(pin.number)
            self._end_if_unused()
            return not self._over

    def begin_copying(self) -> BlockRows | None:
        """The segment, to write to until `end_copying`; None if the attachment is over."""
        with self._lock:
            if self._over:
                return None
            self._copying += 1
            return self.rows

    def end_copying(self) -> None:
        with self._lock:
            self._copying -= 1
            self._end_if_unused()

    def abandon(self) -> bool:
        """It is over. Whether it had no user: then its byte is unlocked by now."""
        with self._lock:
            self._over = True
            self._end_if_unused()
            return self.ended

    def _end_if_unused(self) -> None:
        if self._over and not self._pins and not self._copying and self.rows is not None:
            self._fences.close()
            self.rows = None
