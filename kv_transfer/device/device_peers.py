"""The device arenas of decode nodes that this node writes to."""

from collections.abc import Callable
from pathlib import Path

from baton.errors import UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.shared_memory.fence import WriterFences
from baton.types import Incarnation, Ticket
from kv_transfer.core.send_queue import OutgoingWrite
from kv_transfer.device.arena_export import read_export
from kv_transfer.device.device_memory import DeviceFailed, OnChecksum, PeerMemory, TransferDevice


class DevicePeer:
    """One decode node's arena and fences. It is unmapped when nothing is being written to it."""

    def __init__(self, fences: WriterFences, memory: PeerMemory, num_blocks: int) -> None:
        self.fences = fences
        self.num_blocks = num_blocks
        self.owner_incarnation = Incarnation("")
        self._memory = memory
        self._writes_in_flight = 0
        self._is_closing = False

    def begin_write(
        self,
        write: OutgoingWrite,
        target: list[int],
        on_done: OnChecksum,
        *,
        corrupt: bool,
    ) -> None:
        """Queue a write; `end_write` must follow its end. Raises DeviceFailed."""
        self._memory.write_slabs(
            write.slab_range,
            write.source_blocks,
            target,
            on_done,
            after=write.layer_ends,
            corrupt=corrupt,
        )
        self._writes_in_flight += 1

    def end_write(self) -> None:
        self._writes_in_flight -= 1
        self._close_if_idle()

    def close(self) -> None:
        """Unmap the arena, once its last write has ended."""
        self._is_closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._is_closing and self._writes_in_flight == 0:
            self._is_closing = False
            self._memory.close()
            self.fences.close()


class DevicePeers:
    """The opened arenas, by segment name. Plane's thread only."""

    def __init__(self, device: TransferDevice, folder: Path, layout: KVLayout) -> None:
        self._device = device
        self._folder = folder
        self._layout = layout
        self._peers: dict[str, DevicePeer] = {}

    def get(self, ticket: Ticket) -> DevicePeer:
        """The arena that a ticket names. Raises UnmappableSegment if this node cannot write it."""
        segment = ticket.segment
        if segment.incarnation != ticket.decode_peer.incarnation:
            raise UnmappableSegment(
                f"segment {segment.name} is of incarnation {segment.incarnation}, "
                "not of the ticket's"
            )
        if not self._device.writer_name:
            raise UnmappableSegment("the end of this process could not be proven: see its log")
        peer = self._peers.get(segment.name) or self._open(segment.name)
        block_bytes, end = self._layout.block_bytes, peer.num_blocks * self._layout.block_bytes
        if not all(
            offset % block_bytes == 0 and 0 <= offset < end for offset in ticket.block_offsets
        ):
            raise UnmappableSegment(
                f"segment {segment.name} has no such blocks as ticket {ticket.id} names"
            )
        peer.owner_incarnation = segment.incarnation
        return peer

    def _open(self, segment: str) -> DevicePeer:
        export = read_export(self._folder, segment, self._layout)
        fences = WriterFences(self._folder, segment)
        try:
            memory = self._device.open_peer(export)
        except BaseException:
            fences.close()
            raise
        peer = self._peers[segment] = DevicePeer(fences, memory, export.num_blocks)
        return peer

    def unmap_peer(self, owner: Incarnation) -> None:
        for segment in [
            segment for segment, peer in self._peers.items() if peer.owner_incarnation == owner
        ]:
            self._peers.pop(segment).close()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()


class DeviceWriter:
    """Queues the reads and writes of a sender's device, and hands their ends to its thread."""

    def __init__(
        self,
        device: TransferDevice,
        peers: DevicePeers,
        block_bytes: int,
        post: Callable[[Callable[[], None]], bool],
    ) -> None:
        """`post` runs a call on the plane's thread."""
        self.peers = peers
        self.num_in_flight = 0
        self._device = device
        self._block_bytes = block_bytes
        self._post = post

    def start_write(
        self,
        peer: DevicePeer,
        ticket: Ticket,
        write: OutgoingWrite,
        on_end: Callable[[int | DeviceFailed], None],
        *,
        corrupt: bool,
    ) -> None:
        """Copy slabs to the ticket's blocks; the checksum is passed on. Raises DeviceFailed."""
        first = write.slab_range.first_block - ticket.first_block
        offsets = ticket.block_offsets[first : first + write.slab_range.num_blocks]

        def end_write(result: int | DeviceFailed) -> None:
            self.num_in_flight -= 1
            on_end(result)  # releases the ticket's byte in a file that the next line may close
            peer.end_write()

        peer.begin_write(
            write,
            [offset // self._block_bytes for offset in offsets],
            lambda result: _ignore(self._post(lambda: end_write(result))),
            corrupt=corrupt,
        )
        self.num_in_flight += 1

    def start_read(
        self, write: OutgoingWrite, on_end: Callable[[memoryview | DeviceFailed], None]
    ) -> None:
        """Copy slabs of one layer to host memory and pass them on. Raises DeviceFailed."""

        def end_read(result: memoryview | DeviceFailed) -> None:
            self.num_in_flight -= 1
            on_end(result)

        self._device.read_slabs(
            write.slab_range,
            write.source_blocks,
            lambda result: _ignore(self._post(lambda: end_read(result))),
            after=write.layer_ends,
        )
        self.num_in_flight += 1

    def pass_on_ends(self) -> None:
        """Pass on the results of reads and writes. Call it once nothing more is ready."""
        self._device.pass_on_ends(of_checks=False)


def _ignore(is_posted: bool) -> None:
    """A plane that has ended needs no result: its process ends, or its device is closed."""
