"""How the slabs of one sender reach decode, by the transport of the ticket.

    inline in messages    copied out of the arena              zmq, grpc, memory
    by this process       and into decode's mapped segment     shm
    by its device         into decode's device memory          cuda_ipc

The arena itself may be a device's: then slabs that the device does not write in place are copied to
host memory by it first. What a device does ends later, on the plane's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.errors import HandoffFailed, UnmappableSegment
from baton.kv.blocks import KVLayout
from baton.process.failpoints import FailpointAction
from baton.types import Incarnation, Ticket
from kv_transfer.arena.slab_copier import SlabCopier, finish_payload
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core.handoff_common import CUDA_IPC, ArenaShape, is_one_sided
from kv_transfer.core.send_queue import OutgoingWrite, SendSettings
from kv_transfer.core.writer_lock import NoLock, WriterLock
from kv_transfer.device.device_fence import DeviceTicketLock
from kv_transfer.device.device_memory import DeviceFailed, TransferDevice
from kv_transfer.device.device_peers import DevicePeer, DevicePeers, DeviceWriter
from kv_transfer.transports.shm_arena import PeerArena, PeerArenas, TicketLock


@dataclass(slots=True, kw_only=True)
class WritePath:
    """How the slabs of one ticket are written."""

    ticket: Ticket
    settings: SendSettings
    lock: WriterLock
    peer_arena: PeerArena | None = None  # mapped, if this process writes to it itself
    device_peer: DevicePeer | None = None  # opened, if its device does
    device_lock: DeviceTicketLock | None = None  # the same as `lock`

    @property
    def is_inline(self) -> bool:
        return self.peer_arena is None and self.device_peer is None


@dataclass(frozen=True, slots=True)
class WrittenSlabs:
    """The result of a completed write of KV slabs.

    The slabs were read from the own arena. Over a one-sided transport they are in the peer's arena;
    otherwise `payload` is still to be sent.
    """

    checksum: int
    payload: memoryview | None  # to be sent, if it travels inline


OnWritten = Callable[[WrittenSlabs | HandoffFailed], None]


class SlabWriters:
    """Reads slabs of the own arena and writes those of one-sided transports. Plane's thread."""

    def __init__(
        self,
        arena: memoryview,
        layout: KVLayout,
        settings: TransferSettings,
        device: TransferDevice | None,
    ) -> None:
        """`device`: the memory that slabs are read in, if it is not `arena`."""
        # Runs a command on the plane's thread; called from threads of the device.
        self.post_command: Callable[[Callable[[], None]], bool] = lambda _: False
        self.writer_process = "" if device is None else device.writer_name
        self.shape = ArenaShape(layout.num_layers, layout.num_kv_heads, layout.slab_bytes)
        self._copier = SlabCopier(arena, layout)
        self.num_blocks = self._copier.arena_slabs.num_blocks
        self._settings = settings
        self._arenas = PeerArenas(settings.segment_folder, layout)
        self._device: DeviceWriter | None = None
        if device is not None:
            self._device = DeviceWriter(
                device,
                DevicePeers(device, settings.segment_folder, layout),
                layout.block_bytes,
                lambda command: self.post_command(command),
            )

    @property
    def is_idle(self) -> bool:
        """Whether no device reads or writes."""
        return self._device is None or self._device.num_in_flight == 0

    def open_path(self, ticket: Ticket) -> WritePath:
        """How to write under this ticket. Raises UnmappableSegment if this process cannot."""
        settings = self._settings.make_send_settings()
        if ticket.transport == CUDA_IPC:
            return self._open_device_path(ticket, settings)
        if self._device is not None:  # which copies one layer at a time to host memory
            settings = replace(settings, layers_per_message=1)
        if not is_one_sided(ticket.transport):
            return WritePath(ticket=ticket, settings=settings, lock=NoLock())
        arena = self._arenas.get(ticket)
        lock = TicketLock(arena, ticket)
        return WritePath(ticket=ticket, settings=settings, lock=lock, peer_arena=arena)

    def _open_device_path(self, ticket: Ticket, settings: SendSettings) -> WritePath:
        if self._device is None:
            raise UnmappableSegment("this node does not compute in device memory")
        peer = self._device.peers.get(ticket)
        lock = DeviceTicketLock(peer.fences, ticket.fence_byte)
        settings = replace(
            settings,
            max_payload_bytes=self._settings.device_payload_bytes,
            window_bytes=self._settings.device_credit_bytes,
            initial_window_bytes=0,  # decode's own steps may still write to the blocks
        )
        return WritePath(
            ticket=ticket, settings=settings, lock=lock, device_peer=peer, device_lock=lock
        )

    def start_write(
        self,
        path: WritePath,
        write: OutgoingWrite,
        action: FailpointAction | None,
        on_end: OnWritten,
    ) -> None:
        """Write slabs, or begin to; `on_end` is called here, or later on the plane's thread."""
        try:
            if path.device_peer is not None:
                self._start_device_write(path, path.device_peer, write, action, on_end)
            elif self._device is not None:
                self._start_device_read(self._device, path, write, action, on_end)
            else:
                on_end(self._write_by_copy(path, write, action))
        except DeviceFailed as error:
            on_end(_abandon(path, error))

    def _write_by_copy(
        self, path: WritePath, write: OutgoingWrite, action: FailpointAction | None
    ) -> WrittenSlabs:
        """Copy slabs out of the host's arena, to decode's mapped one or to a payload."""
        if path.peer_arena is None:
            payload, checksum = self._copier.read_slabs(write, action)
            return WrittenSlabs(checksum, payload)
        peer = path.peer_arena.copier
        return WrittenSlabs(self._copier.copy_slabs(write, peer, path.ticket, action), None)

    def _start_device_write(
        self,
        path: WritePath,
        peer: DevicePeer,
        write: OutgoingWrite,
        action: FailpointAction | None,
        on_end: OnWritten,
    ) -> None:
        assert self._device is not None
        self._device.start_write(
            peer,
            path.ticket,
            write,
            lambda result: on_end(
                _abandon(path, result)
                if isinstance(result, DeviceFailed)
                else WrittenSlabs(result, None)
            ),
            corrupt=action is FailpointAction.CORRUPT,
        )

    def _start_device_read(
        self,
        device: DeviceWriter,
        path: WritePath,
        write: OutgoingWrite,
        action: FailpointAction | None,
        on_end: OnWritten,
    ) -> None:
        arena = path.peer_arena

        def end_read(result: memoryview | DeviceFailed) -> None:
            if isinstance(result, DeviceFailed):
                on_end(result)
            else:
                on_end(self._place(path, write, *finish_payload(result, action)))
            if arena is not None:
                self._arenas.end_write(arena)

        device.start_read(write, end_read)
        if arena is not None:
            arena.writes_in_flight += 1

    def _place(
        self,
        path: WritePath,
        write: OutgoingWrite,
        payload: memoryview,
        checksum: int,
    ) -> WrittenSlabs:
        """Copy a payload to decode's mapped arena, if it does not travel inline."""
        if path.peer_arena is None:
            return WrittenSlabs(checksum, payload)
        path.peer_arena.copier.write_slabs(path.ticket, write.slab_range, payload)
        return WrittenSlabs(checksum, None)

    def pass_on_ends(self) -> None:
        """Pass on the results of writes by a device. Call it once nothing more is ready."""
        if self._device is not None:
            self._device.pass_on_ends()

    def unmap_peer(self, owner: Incarnation) -> None:
        """Unmap the arenas of a peer that is gone."""
        self._arenas.unmap_peer(owner)
        if self._device is not None:
            self._device.peers.unmap_peer(owner)

    def close(self) -> None:
        self._arenas.close()
        if self._device is not None:
            self._device.peers.close()


def _abandon(path: WritePath, error: DeviceFailed) -> DeviceFailed:
    """The device failed in a write: decode gets the blocks when this process has ended."""
    if path.device_lock is not None:
        path.device_lock.is_abandoned = True
    return error
