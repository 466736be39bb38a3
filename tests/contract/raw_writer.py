"""A writer that sends single frames, so that it can break the protocol in every way."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import xxhash

from baton.shared_memory.fence import WriterFences
from baton.types import Ticket
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core import frames
from kv_transfer.core.handoff_common import CUDA_IPC
from kv_transfer.core.slabs import SlabRange, extend_manifest_digest
from kv_transfer.device.host_memory import compute_checksum
from kv_transfer.transports.grpc_writer_link import GrpcDialer
from kv_transfer.transports.links import TransferDialer
from kv_transfer.transports.memory_link import MemoryDialer
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.transports.zmq_link import ZmqDialer
from tests.contract.transfer_pair import ONE_SIDED, TOKEN, TransferPair, wait_until

F = TypeVar("F", bound=frames.Frame)


def _dialer(scheme: str, settings: TransferSettings) -> TransferDialer:
    match scheme:
        case "memory":
            return MemoryDialer()
        case "grpc":
            return GrpcDialer(TOKEN, settings)
        case _:
            return ZmqDialer(derive_curve_keys(TOKEN), settings)


class RawWriter:
    """One writer of one ticket, over its own link."""

    def __init__(self, pair: TransferPair, ticket: Ticket) -> None:
        self.pair = pair
        self.ticket = ticket
        self.frame_ids = (
            ticket.id,
            ticket.key.attempt_number,
            ticket.writer_incarnation,
            ticket.decode_peer.incarnation,
        )
        self._dialer = _dialer(
            ticket.decode_peer.transfer_endpoint.partition("://")[0], pair.settings
        )
        self._link = self._dialer.dial(ticket.decode_peer.transfer_endpoint)
        self.fences = WriterFences(pair.folder, ticket.segment.name)
        self.is_one_sided = ticket.transport in ONE_SIDED
        self._manifest = (0, 0, 0)

    def __enter__(self) -> "RawWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.fences.close()
        self._link.close()
        self._dialer.close()

    def send(self, frame: frames.FrameToDecode, payload: bytes | None = None) -> None:
        self.send_bytes(frames.encode_frame(frame), payload)

    def send_bytes(self, header: bytes, payload: bytes | None = None) -> None:
        wait_until(
            lambda: self._link.send(header, None if payload is None else memoryview(payload))
        )

    def receive_frame(self) -> frames.FrameToWriter:
        found: list[bytes] = []

        def arrived() -> bool:
            header = self._link.receive()
            found.extend([] if header is None else [header])
            return bool(found)

        wait_until(arrived)
        return frames.parse_frame_to_writer(found[0])

    def is_link_lost(self) -> bool:
        return self._link.get_loss() is not None

    def send_open(self) -> None:
        self.send_open_frame()
        assert isinstance(self.receive_frame(), frames.CreditFrame)

    def send_open_frame(self) -> None:
        layout = self.pair.layout
        self.send(
            frames.OpenFrame(
                *self.frame_ids,
                frames.PROTOCOL_VERSION,
                layout.num_layers,
                layout.slab_bytes,
                1 << 20,
                "elsewhere",
                self.pair.writer_name,
            )
        )

    def make_write_frame(self, slab_range: SlabRange) -> tuple[frames.WriteFrame, bytes]:
        """A correct Write and its payload. Logical block N is source block N."""
        layers = slice(slab_range.first_layer, slab_range.end_layer)
        payload = (
            self.pair.prefill_arena[slab_range.first_block : slab_range.end_block, layers]
            .swapaxes(0, 1)
            .tobytes()
        )
        frame = frames.WriteFrame(
            *self.frame_ids,
            first_layer=slab_range.first_layer,
            num_layers=slab_range.num_layers,
            first_block=slab_range.first_block,
            num_blocks=slab_range.num_blocks,
            first_kv_head=0,
            num_kv_heads=self.pair.layout.num_kv_heads,
            payload_bytes=len(payload),
            checksum=self._compute_checksum(payload, slab_range),
            is_inline=not self.is_one_sided,
        )
        return frame, payload

    def _compute_checksum(self, payload: bytes, slab_range: SlabRange) -> int:
        if self.ticket.transport == CUDA_IPC:
            return compute_checksum(memoryview(payload), slab_range)
        return xxhash.xxh3_64_intdigest(payload)

    def send_write(self, slab_range: SlabRange, **wrong: int | bool | str) -> None:
        """Send a Write, with some fields of its frame replaced by `wrong`."""
        frame, payload = self.make_write_frame(slab_range)
        if self.is_one_sided:
            self.write_in_place(slab_range)
        slabs, size, digest = self._manifest
        self._manifest = (
            slabs + slab_range.num_slabs,
            size + len(payload),
            extend_manifest_digest(digest, slab_range, frame.checksum),
        )
        self.send(_with_fields(frame, wrong), None if self.is_one_sided else payload)

    def write_in_place(self, slab_range: SlabRange) -> None:
        """Copy the bytes into decode's arena, as a one-sided writer does."""
        for block in range(slab_range.first_block, slab_range.end_block):
            at = (
                self.ticket.block_offsets[block - self.ticket.first_block]
                // self.pair.layout.block_bytes
            )
            for layer in range(slab_range.first_layer, slab_range.end_layer):
                self.pair.decode_arena[at, layer] = self.pair.prefill_arena[block, layer]

    def send_all_writes(self) -> None:
        grid = SlabRange(
            0, self.pair.layout.num_layers, self.ticket.first_block, len(self.ticket.block_offsets)
        )
        self.send_write(grid)
        assert isinstance(self.receive_frame(), frames.LandedFrame)

    def send_seal(self, **wrong: int) -> None:
        slabs, size, digest = self._manifest
        self.send(
            _with_fields(
                frames.SealFrame(*self.frame_ids, slabs, size, digest, (17,), None, ()), wrong
            )
        )

    def expect_refused(self, code: str) -> None:
        answer = self.receive_frame()
        assert isinstance(answer, frames.RefusedFrame), answer
        assert answer.code == code, answer


def _with_fields(frame: F, fields: Mapping[str, int | bool | str]) -> F:
    return msgspec.structs.replace(frame, **fields)
