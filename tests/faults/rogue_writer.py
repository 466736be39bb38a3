"""A prefill node that has the cluster token and violates the protocol.

It joins a real cluster, gets real work and tickets, and then sends invalid frames to a real
decode node."""

import asyncio
import contextlib
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.order_codec import ticket_from_pb
from baton.errors import HandoffFailed
from baton.pb import cluster_pb2 as pb
from baton.types import AttemptKey, Ticket
from kv_transfer.common.settings import TransferSettings
from kv_transfer.core import frames
from kv_transfer.transports.zmq_keys import derive_curve_keys
from kv_transfer.transports.zmq_link import ZmqDialer, ZmqWriterLink
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.host.engine_factory import build_engine
from tests.fake_nodes import FakeNode
from tests.faults.observed_cluster import PATIENCE_SECONDS, ObservedCluster, PendingCall, make_call
from tests.history import ClientApi

F = TypeVar("F", bound=frames.Frame)

_HEARTBEAT_SECONDS = 0.2  # seconds
_POLL_SECONDS = 0.005


@dataclass
class RogueGrant:
    """Work that the rogue was given, and its ticket."""

    call: PendingCall
    key: AttemptKey
    ticket: Ticket


class RogueWriter:
    """Use as `async with Rogue(observed) as rogue`. `obtain_ticket` gets it a ticket; `write_frame`
    and its like send frames that are right but for the `wrong` fields."""

    def __init__(self, observed: ObservedCluster) -> None:
        self._cluster = observed
        config = observed.cluster.config
        engine = build_engine(config, "cpu", StepLimits(64, 512))
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
            "implementation": engine.model_identity.implementation,
            "dtype": engine.model_identity.dtype,
            "quantization": engine.model_identity.quantization,
        }
        self._node = FakeNode(
            observed.cluster.endpoints.cluster, "rogue", "prefill", config.cluster_token, changes
        )
        self._dialer = ZmqDialer(derive_curve_keys(config.cluster_token), TransferSettings())
        self._link: ZmqWriterLink | None = None

    async def __aenter__(self) -> Self:
        await self._node.join()
        self._node.run_script(self._send_heartbeats())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._node.drop_connection()
        if self._link is not None:
            self._link.close()
        self._dialer.close()

    async def _send_heartbeats(self) -> None:
        while True:
            with _ignore_ended_stream():
                await self._node.send_heartbeat(blocks_total=512, blocks_free=512)
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    async def obtain_ticket(self, salt: int) -> RogueGrant:
        """Send requests until the coordinator places one on the rogue, and return its ticket."""
        asked = self._cluster.start_call(make_call(ClientApi.SSE, 100, 6, salt=salt))
        while (given := await self._next_ticket(asked)) is None:
            salt += 1000  # somebody honest serves it
            asked = self._cluster.start_call(make_call(ClientApi.SSE, 100, 6, salt=salt))
        ticket = ticket_from_pb(given)
        if self._link is not None:
            self._link.close()
        self._link = self._dialer.dial(ticket.decode_peer.transfer_endpoint)
        return RogueGrant(asked, ticket.key, ticket)

    async def _next_ticket(self, asked: PendingCall) -> pb.Ticket | None:
        """Return the next ticket for the rogue; None when the request was served by other nodes."""
        while True:
            order = asyncio.ensure_future(self._node.orders.get())
            done, _ = await asyncio.wait({order, asked.task}, return_when=asyncio.FIRST_COMPLETED)
            if order not in done:
                order.cancel()
                return None
            message = order.result()
            if message is None:  # the coordinator dropped us as silent, on a busy machine
                await self._node.join()
                return None
            if message.HasField("ticket"):
                return message.ticket.ticket

    async def give_up_work(self, grant: RogueGrant) -> None:
        """Report a failure, so that the coordinator places the request on another node."""
        with _ignore_ended_stream():
            await self._node.send_failed(grant.key, HandoffFailed("the rogue has had its fun"))

    # what it says to decode

    async def send_frame(self, frame: frames.FrameToDecode, payload: bytes | None = None) -> None:
        assert self._link is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not self._link.send(
                frames.encode_frame(frame), memoryview(payload) if payload is not None else None
            ):
                await asyncio.sleep(_POLL_SECONDS)

    async def send_bytes(self, *parts: bytes) -> None:
        assert self._link is not None
        assert self._link.send(parts[0], memoryview(parts[1]) if len(parts) > 1 else None)

    async def next_frame(self) -> frames.FrameToWriter:
        """The next frame from decode."""
        assert self._link is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (header := self._link.receive()) is None:
                await asyncio.sleep(_POLL_SECONDS)
        return frames.parse_frame_to_writer(header)

    async def next_refusal(self) -> frames.RefusedFrame:
        """The next frame other than Credit and Landed must be this one."""
        while not isinstance(frame := await self.next_frame(), frames.RefusedFrame):
            assert isinstance(frame, frames.CreditFrame | frames.LandedFrame), frame
        return frame

    def open_frame(self, ticket: Ticket, **wrong: Any) -> frames.OpenFrame:
        right = frames.OpenFrame(
            *_frame_ids(ticket),
            frames.PROTOCOL_VERSION,
            self.layout.num_layers,
            self.layout.slab_bytes,
            1 << 20,
            "rogue",
            "",
        )
        return _with_fields(right, wrong)

    def write_frame(self, ticket: Ticket, checksum: int, **wrong: Any) -> frames.WriteFrame:
        """Layer 0 of the ticket's first block."""
        layer, layers, block, blocks, head, heads = (
            0,
            1,
            ticket.first_block,
            1,
            0,
            self.layout.num_kv_heads,
        )
        right = frames.WriteFrame(
            *_frame_ids(ticket),
            layer,
            layers,
            block,
            blocks,
            head,
            heads,
            self.layout.slab_bytes,
            checksum,
            is_inline=True,
        )
        return _with_fields(right, wrong)

    def seal_frame(self, ticket: Ticket, **wrong: Any) -> frames.SealFrame:
        slabs = self.layout.num_layers * len(ticket.block_offsets)
        return _with_fields(
            frames.SealFrame(
                *_frame_ids(ticket), slabs, slabs * self.layout.slab_bytes, 0, (7,), None, ()
            ),
            wrong,
        )


def _ignore_ended_stream() -> contextlib.suppress:
    """On a busy machine the coordinator may end the stream because it heard from this process
    too late."""
    return contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError)


def _frame_ids(ticket: Ticket) -> tuple[str, int, str, str]:
    return (
        ticket.id,
        ticket.key.attempt_number,
        ticket.writer_incarnation,
        ticket.decode_peer.incarnation,
    )


def _with_fields(frame: F, wrong: dict[str, Any]) -> F:
    fields = {name: getattr(frame, name) for name in frame.__struct_fields__} | wrong
    return type(frame)(**fields)


def forge_ticket(ticket: Ticket, **changes: Any) -> Ticket:
    return replace(ticket, **changes)
