"""A prefill node that has the cluster's token and plays by no rules: it joins a real cluster, gets real work and real
tickets, and then sends what it likes to a real decode node."""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from baton import wire
from baton.errors import HandoffFailed
from baton.pb import cluster_pb2 as pb
from baton.types import AttemptKey, Ticket
from kv_transfer.core import frames
from kv_transfer.security import derive_keys
from kv_transfer.settings import TransferSettings
from kv_transfer.zmq_link import ZmqDialer, ZmqWriterLink
from node_engine.host.engines import build_engine
from tests.fakes import FakeNode
from tests.faults.scene import PATIENCE, Asked, Scene, call
from tests.history import Door

F = TypeVar("F", bound=frames.Frame)

_BEAT = 0.2  # seconds
_LOOK_EVERY = 0.005


@dataclass
class Grant:
    """Work that the rogue was given, and its ticket."""

    asked: Asked
    key: AttemptKey
    ticket: Ticket


class Rogue:
    """Use as `async with Rogue(scene) as rogue`. `grant` gets it a ticket; `write` and its like send frames that are
    right but for the `wrong` fields."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        config = scene.cluster.config
        engine = build_engine(config)
        self.layout = engine.layout
        changes = {
            "host_id": "the rogue's",
            "transfer_endpoint": "",
            "model_digest": engine.model_digest.hex(),
            "layout": wire.layout_to_pb(engine.layout),
            "num_blocks": 512,
            "max_num_seqs": 64,
            "max_batched_tokens": 1 << 16,
            "max_model_len": engine.max_model_len,
            "vocab_size": engine.vocab_size,
            "eos_token_ids": engine.eos_token_ids,
            "implementation": engine.identity.implementation,
            "dtype": engine.identity.dtype,
            "quantization": engine.identity.quantization,
        }
        self._node = FakeNode(scene.cluster.where.cluster, "rogue", "prefill", config.cluster_token, changes)
        self._dialer = ZmqDialer(derive_keys(config.cluster_token), TransferSettings())
        self._link: ZmqWriterLink | None = None

    async def __aenter__(self) -> Self:
        await self._node.join()
        self._node.run(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._node.die()
        if self._link is not None:
            self._link.close()
        self._dialer.close()

    async def _beat(self) -> None:
        while True:
            with _given_up():
                await self._node.heartbeat(blocks_total=512, blocks_free=512)
            await asyncio.sleep(_BEAT)

    async def grant(self, salt: int) -> Grant:
        """Ask for something until the coordinator gives it to the rogue, and take the ticket."""
        asked = self._scene.ask(call(Door.SSE, 100, 6, salt=salt))
        while (given := await self._ticket_unless(asked)) is None:
            salt += 1000  # somebody honest serves it
            asked = self._scene.ask(call(Door.SSE, 100, 6, salt=salt))
        ticket = wire.ticket_from_pb(given)
        if self._link is not None:
            self._link.close()
        self._link = self._dialer.dial(ticket.decode.transfer_endpoint)
        return Grant(asked, ticket.key, ticket)

    async def _ticket_unless(self, asked: Asked) -> pb.Ticket | None:
        """The next ticket given to us, None when the request is answered without us. Other orders are passed over."""
        while True:
            order = asyncio.ensure_future(self._node.orders.get())
            done, _ = await asyncio.wait({order, asked.task}, return_when=asyncio.FIRST_COMPLETED)
            if order not in done:
                order.cancel()
                return None
            message = order.result()
            if message is None:  # given up as silent, on a busy machine
                await self._node.join()
                return None
            if message.HasField("ticket"):
                return message.ticket.ticket

    async def give_up(self, grant: Grant) -> None:
        """The coordinator may place the request with somebody honest."""
        with _given_up():
            await self._node.failed(grant.key, HandoffFailed("the rogue has had its fun"))

    # what it says to decode

    async def send(self, frame: frames.ToDecode, payload: bytes | None = None) -> None:
        assert self._link is not None
        async with asyncio.timeout(PATIENCE):
            while not self._link.send(frames.encode(frame), memoryview(payload) if payload is not None else None):
                await asyncio.sleep(_LOOK_EVERY)

    async def send_bytes(self, *parts: bytes) -> None:
        assert self._link is not None
        assert self._link.send(parts[0], memoryview(parts[1]) if len(parts) > 1 else None)

    async def answer(self) -> frames.ToWriter:
        """The next frame from decode."""
        assert self._link is not None
        async with asyncio.timeout(PATIENCE):
            while (header := self._link.receive()) is None:
                await asyncio.sleep(_LOOK_EVERY)
        return frames.decode_to_writer(header)

    async def refused(self) -> frames.Refused:
        """The next frame but Credit and Landed must be this."""
        while not isinstance(frame := await self.answer(), frames.Refused):
            assert isinstance(frame, frames.Credit | frames.Landed), frame
        return frame

    def open(self, ticket: Ticket, **wrong: Any) -> frames.Open:
        right = frames.Open(
            *_ids(ticket), frames.PROTOCOL_VERSION, self.layout.num_layers, self.layout.slab_bytes, 1 << 20, "rogue"
        )
        return _but(right, wrong)

    def write(self, ticket: Ticket, checksum: int, **wrong: Any) -> frames.Write:
        """Layer 0 of the ticket's first block."""
        layer, layers, block, blocks, head, heads = 0, 1, ticket.first_block, 1, 0, self.layout.num_kv_heads
        right = frames.Write(
            *_ids(ticket), layer, layers, block, blocks, head, heads, self.layout.slab_bytes, checksum, inline=True
        )
        return _but(right, wrong)

    def seal(self, ticket: Ticket, **wrong: Any) -> frames.Seal:
        slabs = self.layout.num_layers * len(ticket.offsets)
        return _but(frames.Seal(*_ids(ticket), slabs, slabs * self.layout.slab_bytes, 0, (7,), None, ()), wrong)


def _given_up() -> contextlib.suppress:
    """The coordinator has ended the stream: on a busy machine, because it heard too late of this process."""
    return contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError)


def _ids(ticket: Ticket) -> tuple[str, int, str, str]:
    return ticket.id, ticket.key.attempt, ticket.writer, ticket.decode.incarnation


def _but(frame: F, wrong: dict[str, Any]) -> F:
    fields = {name: getattr(frame, name) for name in frame.__struct_fields__} | wrong
    return type(frame)(**fields)


def forged(ticket: Ticket, **changes: Any) -> Ticket:
    return replace(ticket, **changes)
