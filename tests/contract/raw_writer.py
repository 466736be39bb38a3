"""A writer that speaks frames by hand, so that it can be wrong in every way that a Departure never is."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
import xxhash

from baton.fence import WriterFences
from baton.types import Ticket
from kv_transfer.core import frames
from kv_transfer.core.slabs import Rectangle, manifest_digest
from kv_transfer.memory_link import MemoryDialer
from kv_transfer.security import derive_keys
from kv_transfer.transport import Dialer
from kv_transfer.zmq_link import ZmqDialer
from tests.contract.rig import TOKEN, Rig, eventually

F = TypeVar("F", bound=frames.Frame)


class RawWriter:
    def __init__(self, pair: Rig, ticket: Ticket) -> None:
        self.pair = pair
        self.ticket = ticket
        self.ids = (ticket.id, ticket.key.attempt, ticket.writer, ticket.decode.incarnation)
        memory = ticket.decode.transfer_endpoint.startswith("memory")
        self._dialer: Dialer = MemoryDialer() if memory else ZmqDialer(derive_keys(TOKEN), pair.settings)
        self._link = self._dialer.dial(ticket.decode.transfer_endpoint)
        self.fences = WriterFences(pair.folder, ticket.segment.name)
        self.one_sided = ticket.transport == "shm"
        self._manifest = (0, 0, 0)

    def __enter__(self) -> "RawWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.fences.close()
        self._link.close()
        self._dialer.close()

    def send(self, frame: frames.ToDecode, payload: bytes | None = None) -> None:
        self.send_bytes(frames.encode(frame), payload)

    def send_bytes(self, header: bytes, payload: bytes | None = None) -> None:
        eventually(lambda: self._link.send(header, None if payload is None else memoryview(payload)))

    def answer(self) -> frames.ToWriter:
        found: list[bytes] = []

        def arrived() -> bool:
            header = self._link.receive()
            found.extend([] if header is None else [header])
            return bool(found)

        eventually(arrived)
        return frames.decode_to_writer(found[0])

    def lost(self) -> bool:
        return self._link.loss() is not None

    def open(self) -> None:
        layout = self.pair.layout
        self.send(
            frames.Open(*self.ids, frames.PROTOCOL_VERSION, layout.num_layers, layout.slab_bytes, 1 << 20, "elsewhere")
        )
        assert isinstance(self.answer(), frames.Credit)

    def write_frame(self, area: Rectangle) -> tuple[frames.Write, bytes]:
        """A right one; source blocks are those of the same number as the logical ones."""
        layers = slice(area.layer, area.last_layer)
        payload = self.pair.source[area.block : area.last_block, layers].swapaxes(0, 1).tobytes()
        frame = frames.Write(
            *self.ids,
            layer=area.layer,
            layers=area.layers,
            block=area.block,
            blocks=area.blocks,
            head=0,
            heads=self.pair.layout.num_kv_heads,
            size=len(payload),
            checksum=xxhash.xxh3_64_intdigest(payload),
            inline=not self.one_sided,
        )
        return frame, payload

    def write(self, area: Rectangle, **wrong: int | bool | str) -> None:
        """Write it, with some fields of the frame replaced."""
        frame, payload = self.write_frame(area)
        if self.one_sided:
            self.place(area)
        slabs, size, digest = self._manifest
        self._manifest = (slabs + area.slabs, size + len(payload), manifest_digest(digest, area, frame.checksum))
        self.send(_changed(frame, wrong), None if self.one_sided else payload)

    def place(self, area: Rectangle) -> None:
        """The bytes themselves, as a one-sided writer puts them."""
        for block in range(area.block, area.last_block):
            at = self.ticket.offsets[block - self.ticket.first_block] // self.pair.layout.block_bytes
            for layer in range(area.layer, area.last_layer):
                self.pair.target[at, layer] = self.pair.source[block, layer]

    def write_all(self) -> None:
        grid = Rectangle(0, self.pair.layout.num_layers, self.ticket.first_block, len(self.ticket.offsets))
        self.write(grid)
        assert isinstance(self.answer(), frames.Landed)

    def seal(self, **wrong: int) -> None:
        slabs, size, digest = self._manifest
        self.send(_changed(frames.Seal(*self.ids, slabs, size, digest, (17,), None, ()), wrong))

    def refused(self, code: str) -> None:
        answer = self.answer()
        assert isinstance(answer, frames.Refused), answer
        assert answer.code == code, answer


def _changed(frame: F, fields: Mapping[str, int | bool | str]) -> F:
    return msgspec.structs.replace(frame, **fields)
