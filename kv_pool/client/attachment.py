"""A node's attachment: the pool's segment mapped beside its own, and the byte of the fence file
that it holds as long as anything reads or writes there.

It is over when its stream breaks, and then takes no new user. Its last user, of before, unlocks the
byte and lets the mapping go: only then may the pool use what was pinned for something else.
"""

import threading
from pathlib import Path
from weakref import WeakValueDictionary

from baton.errors import PeerUnreachable
from baton.kv.pool_types import PoolHit, PoolPin
from baton.pb.pool_pb2 import Attached, Found
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.fence import WriterFences
from baton.types import BlockIndex
from kv_pool.common.block_rows import BlockRows

POOL_MISS = PoolHit(None, ())


class SegmentMappings:
    """Pools' segments in the node's address space. Attachments to one segment share its mapping,
    which goes with the last of them."""

    def __init__(self, space: BlockAddressSpace, folder: Path, block_bytes: int) -> None:
        self.folder = folder
        self._space = space
        self._block_bytes = block_bytes
        self._mapped: WeakValueDictionary[str, BlockRows] = WeakValueDictionary()

    def map_segment(self, segment: str) -> tuple[BlockRows, int]:
        """Its rows, and the global block index of the first. It may take a while. Raises PeerGone,
        LayoutMismatch or ConfigError."""
        rows = self._mapped.get(segment)
        if rows is None:
            rows = self._mapped[segment] = BlockRows(
                self._space.attach_segment(segment), self._block_bytes
            )
        return rows, self._space.address_map.get_span(segment).start


class PoolAttachment:
    """Thread-safe. `number` counts those of this node."""

    def __init__(self, number: int, said: Attached, mappings: SegmentMappings) -> None:
        """Lock, then map; it may take a while. Raises PeerGone, LayoutMismatch or ConfigError."""
        self.number = number
        self.rows: BlockRows | None
        self._fences = WriterFences(mappings.folder, said.segment)
        try:
            if not self._fences.try_lock_byte(said.fence):
                raise PeerUnreachable(
                    f"byte {said.fence} of segment {said.segment} is the pool's again: it took too long"
                )
            self.rows, self._first_global_block = mappings.map_segment(said.segment)
        except BaseException:
            # else nobody ever could: the pool would wait for its byte for as long as this lives
            self._fences.close()
            raise
        self._lock = threading.Lock()
        self._pins: set[int] = set()
        self._num_copying = 0
        self._is_detached = False

    @property
    def is_detached(self) -> bool:
        return self._is_detached

    @property
    def is_unmapped(self) -> bool:
        """Over and without users: the byte is unlocked."""
        return self.rows is None

    def register_hit(self, found: Found) -> PoolHit:
        """What the pool found, with its pin as a user. A miss if the attachment is over."""
        if not found.pin:
            return POOL_MISS
        with self._lock:
            if self._is_detached:
                return POOL_MISS
            self._pins.add(found.pin)
        blocks = tuple(BlockIndex(self._first_global_block + block) for block in found.blocks)
        partial = (BlockIndex(self._first_global_block + found.partial_block), found.partial_tokens)
        return PoolHit(
            PoolPin(self.number, found.pin),
            blocks,
            partial if found.partial_tokens else None,
            found.remote,
        )

    def release_pin(self, pin: PoolPin) -> bool:
        """Whether the pool is to be told. Raises ValueError for a pin that is not held."""
        with self._lock:
            if pin.pin_number not in self._pins:
                raise ValueError(f"{pin} is released and not held")
            self._pins.remove(pin.pin_number)
            self._unmap_if_unused()
            return not self._is_detached

    def begin_copying(self) -> BlockRows | None:
        """The segment, to write to until `end_copying`; None if the attachment is over."""
        with self._lock:
            if self._is_detached:
                return None
            self._num_copying += 1
            return self.rows

    def end_copying(self) -> None:
        with self._lock:
            self._num_copying -= 1
            self._unmap_if_unused()

    def detach(self) -> bool:
        """It is over. Whether it had no user: then its byte is unlocked by now."""
        with self._lock:
            self._is_detached = True
            self._unmap_if_unused()
            return self.is_unmapped

    def _unmap_if_unused(self) -> None:
        if self._is_detached and not self._pins and not self._num_copying and self.rows is not None:
            self._fences.close()
            self.rows = None
