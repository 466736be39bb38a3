"""A node's attachment to its pool: the mapped segment and a locked byte of its fence file.

The node holds the lock as long as anything in it reads or writes the segment. When the stream to
the pool ends, the attachment is detached and takes no new users. The last of its users unlocks the
byte and unmaps the segment; only then may the pool reuse the blocks that were pinned.
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
    """The segments of pools that are mapped in the node's address space.

    Attachments to one segment share its mapping, which is removed with the last of them.
    """

    def __init__(self, space: BlockAddressSpace, folder: Path, block_bytes: int) -> None:
        self.folder = folder
        self._space = space
        self._block_bytes = block_bytes
        self._mapped: WeakValueDictionary[str, BlockRows] = WeakValueDictionary()

    def map_segment(self, segment: str) -> tuple[BlockRows, int]:
        """Map a segment, which may take a while; returns its rows and its first global block index.

        Raises PeerUnreachable, LayoutMismatch or ConfigError.
        """
        rows = self._mapped.get(segment)
        if rows is None:
            rows = self._mapped[segment] = BlockRows(
                self._space.attach_segment(segment), self._block_bytes
            )
        return rows, self._space.address_map.get_span(segment).start


class PoolAttachment:
    """One attachment of this node. Thread-safe."""

    def __init__(self, number: int, attached: Attached, mappings: SegmentMappings) -> None:
        """Lock the fence byte, then map the segment, which may take a while.

        Raises PeerUnreachable, LayoutMismatch or ConfigError.
        """
        self.number = number  # counts the attachments of this node
        self.rows: BlockRows | None  # None when the segment is unmapped
        self._fences = WriterFences(mappings.folder, attached.segment)
        try:
            if not self._fences.try_lock_byte(attached.fence):
                raise PeerUnreachable(
                    f"the pool has taken back byte {attached.fence} of segment "
                    f"{attached.segment}: attaching took too long"
                )
            self.rows, self._first_global_block = mappings.map_segment(attached.segment)
        except BaseException:
            # Otherwise the byte would stay locked, and the pool wait for it, until this node ends.
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
        """Whether the attachment is detached and has no users: its fence byte is unlocked."""
        return self.rows is None

    def register_hit(self, found: Found) -> PoolHit:
        """Convert a match of the pool and hold its pin; a miss if the attachment is detached."""
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
        """Release a pin; returns whether the pool has to be notified.

        Raises ValueError for a pin that is not held.
        """
        with self._lock:
            if pin.pin_number not in self._pins:
                raise ValueError(f"{pin} is released and not held")
            self._pins.remove(pin.pin_number)
            self._unmap_if_unused()
            return not self._is_detached

    def begin_copying(self) -> BlockRows | None:
        """Return the segment's rows, to write to until `end_copying`; None if detached."""
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
        """End the attachment; returns whether it had no users, so that its byte is unlocked."""
        with self._lock:
            self._is_detached = True
            self._unmap_if_unused()
            return self.is_unmapped

    def _unmap_if_unused(self) -> None:
        if self._is_detached and not self._pins and not self._num_copying and self.rows is not None:
            self._fences.close()
            self.rows = None
