"""Blocks on their way from another host's pool into this one's segment, as a hand-off is on its way
to a decode node: this pool grants a ticket for places, asks the other one to write them, and
nothing counts before it is sealed.

Transports between hosts are two-sided. All that lands lands by this pool's own hand, so once a
ticket is lost nothing is written there any more.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError, HandoffFailed, PeerUnreachable
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.types import (
    AttemptKey,
    Incarnation,
    PeerAddress,
    RequestId,
    SegmentRef,
    Ticket,
    TicketId,
    mint_id,
)
from kv_pool.common.grpc_link import PeerChannels
from kv_pool.common.protocol import PEER_PROTOCOL_VERSION, PoolIdentity
from kv_pool.core.blocks.attachments import Publication
from kv_pool.core.index.prompt_chain import PromptChain
from kv_transfer.plane import InboundEvent, InboundLost, InboundPlane, InboundSealed

MakeInboundPlane = Callable[[Callable[[InboundEvent], None]], InboundPlane]


class PromotionReceiver:
    """Belongs to one event loop. `make_plane` is given what to call with events, from any
    thread."""

    def __init__(
        self,
        make_plane: MakeInboundPlane,
        me: PoolIdentity,
        channels: PeerChannels,
        ticket_ttl: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = make_plane(self._emit)
        self._identity = me
        self._channels = channels
        self._ticket_ttl = ticket_ttl
        self._incarnation = Incarnation("")
        self._in_flight: dict[TicketId, asyncio.Future[None]] = {}
        self._send_calls: set[asyncio.Task[None]] = set()

    @property
    def is_joined(self) -> bool:
        """Tickets can be granted: there is an incarnation to bind them to."""
        return bool(self._incarnation)

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._plane.rejoin(incarnation)

    async def fetch_blocks(self, peer: PeerAddress, written: Publication) -> None:
        """Once joined: fill the places of a publication with what `peer` has. Raises BatonError if
        it does not come, or not whole; either way nothing is written to them afterwards."""
        ticket = self._make_ticket(peer, written)
        landed = self._in_flight[ticket.id] = self._loop.create_future()
        self._plane.grant_ticket(ticket)
        asking = asyncio.create_task(self._call_send(peer, written, ticket))
        self._send_calls.add(asking)
        asking.add_done_callback(self._send_calls.discard)
        try:
            await landed
        except BatonError:
            asking.cancel()
            raise
        self._plane.commit_ticket(ticket.id)

    def counters(self) -> dict[str, float]:
        return self._plane.counters()

    async def close(self) -> None:
        for asking in self._send_calls:
            asking.cancel()
        await asyncio.to_thread(self._plane.close)
        await asyncio.gather(*self._send_calls, return_exceptions=True)
        await self._channels.close()

    def _make_ticket(self, peer: PeerAddress, written: Publication) -> Ticket:
        size = self._identity.layout.block_bytes
        me = PeerAddress(
            self._identity.name, self._incarnation, self._identity.host_id, self._plane.endpoint
        )
        end = written.first_block + len(written.blocks)
        return Ticket(
            id=TicketId(mint_id()),
            key=AttemptKey(RequestId(mint_id()), 1, 0),
            decode_peer=me,
            writer_incarnation=peer.incarnation,
            first_block=written.first_block,
            block_offsets=tuple(block * size for block in written.blocks),
            num_tokens=end * self._identity.layout.block_size,
            ttl_seconds=self._ticket_ttl,
            transport=self._plane.choose_transport(peer.host_id),
            segment=SegmentRef(self._identity.segment_name, self._incarnation),
            fence_byte=self._plane.allocate_fence_byte(),
        )

    async def _call_send(self, peer: PeerAddress, written: Publication, ticket: Ticket) -> None:
        """To its end, which the other pool tells. If it is not a good one, the ticket is lost."""
        end = written.first_block + len(written.blocks)
        question = pb.SendBlocks(
            protocol_version=PEER_PROTOCOL_VERSION,
            model_digest=self._identity.model_digest,
            layout=wire.layout_to_pb(self._identity.layout),
            chain=_chain_to_pb(written.chain.prefix(end)),
            ticket=wire.ticket_to_pb(ticket),
        )
        error: BatonError | None = PeerUnreachable(
            f"pool {peer.name} is asked no further"
        )  # the channel is closed under it
        try:
            channel = await self._channels.get_channel(peer.transfer_endpoint)
            try:
                answer = await pool_pb2_grpc.PoolPeersStub(channel).Send(question)
            except grpc.aio.AioRpcError as failure:
                error = PeerUnreachable(
                    f"pool {peer.name} at {peer.transfer_endpoint}: {failure.code().name}"
                )
                await self._channels.close_channel(peer.transfer_endpoint, channel)
            else:
                error = wire.error_from_pb(answer.error) if answer.HasField("error") else None
        finally:
            if error is not None:
                self._plane.revoke_ticket(ticket.id, error)

    def _emit(self, event: InboundEvent) -> None:
        """From the plane's thread. A loop that has ended has nobody left to tell."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: InboundEvent) -> None:
        match event:
            case InboundSealed(ticket):
                _complete(self._in_flight.pop(ticket, None), None)
            case InboundLost(
                ticket, error
            ):  # if it was sealed before, all of it is there, and only the commit is lost
                _complete(self._in_flight.pop(ticket, None), error)
            case _:
                pass


def _complete(landed: "asyncio.Future[None] | None", error: BatonError | None) -> None:
    if landed is None or landed.done():
        return
    if error is None:
        landed.set_result(None)
    else:
        landed.set_exception(error if error.is_retryable else HandoffFailed(error.message))


def _chain_to_pb(chain: PromptChain) -> pb.Chain:
    return pb.Chain(root=chain.root_hash, names=chain.packed_hashes, tokens=chain.packed_tokens)
