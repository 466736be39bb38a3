"""Fetching of blocks from another host's pool into this pool's segment, by the transfer plane.

It works like a hand-off to a decode node: this pool grants a ticket for its blocks and requests the
other pool to write them; nothing is used before the transfer is sealed. Transports between hosts
are two-sided: this process itself writes all data that arrives, so nothing is written to the blocks
once their ticket is lost.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.order_codec import ticket_to_pb
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
from kv_pool.core.index.radix_index import PromptChain
from kv_transfer.plane import InboundEvent, InboundLost, InboundPlane, InboundSealed

MakeInboundPlane = Callable[[Callable[[InboundEvent], None]], InboundPlane]


class PromotionReceiver:
    """Fetches blocks from other hosts' pools. Belongs to one event loop.

    `make_plane` gets a callback for the plane's events, which may be called from any thread.
    """

    def __init__(
        self,
        make_plane: MakeInboundPlane,
        identity: PoolIdentity,
        channels: PeerChannels,
        ticket_ttl: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = make_plane(self._emit)
        self._identity = identity
        self._channels = channels
        self._ticket_ttl = ticket_ttl
        self._incarnation = Incarnation("")
        self._in_flight: dict[TicketId, asyncio.Future[None]] = {}
        self._send_calls: set[asyncio.Task[None]] = set()

    @property
    def is_joined(self) -> bool:
        """Whether this pool has an incarnation, to which it can bind tickets."""
        return bool(self._incarnation)

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._plane.rejoin(incarnation)

    async def fetch_blocks(self, peer: PeerAddress, publication: Publication) -> None:
        """Fill the blocks of a publication from `peer`; this pool must have joined.

        Raises BatonError if the transfer fails. When this returns or raises, nothing writes to the
        blocks any more.
        """
        ticket = self._make_ticket(peer, publication)
        landed = self._in_flight[ticket.id] = self._loop.create_future()
        self._plane.grant_ticket(ticket)
        send_call = asyncio.create_task(self._call_send(peer, publication, ticket))
        self._send_calls.add(send_call)
        send_call.add_done_callback(self._send_calls.discard)
        try:
            await landed
        except BatonError:
            send_call.cancel()
            raise
        self._plane.commit_ticket(ticket.id)

    def counters(self) -> dict[str, float]:
        return self._plane.counters()

    async def close(self) -> None:
        for send_call in self._send_calls:
            send_call.cancel()
        await asyncio.to_thread(self._plane.close)
        await asyncio.gather(*self._send_calls, return_exceptions=True)
        await self._channels.close()

    def _make_ticket(self, peer: PeerAddress, publication: Publication) -> Ticket:
        block_bytes = self._identity.layout.block_bytes
        own_address = PeerAddress(
            self._identity.name, self._incarnation, self._identity.host_id, self._plane.endpoint
        )
        end = publication.first_block + len(publication.blocks)
        return Ticket(
            id=TicketId(mint_id()),
            key=AttemptKey(RequestId(mint_id()), 1, 0),
            decode_peer=own_address,
            writer_incarnation=peer.incarnation,
            first_block=publication.first_block,
            block_offsets=tuple(block * block_bytes for block in publication.blocks),
            num_tokens=end * self._identity.layout.block_size,
            ttl_seconds=self._ticket_ttl,
            transport=self._plane.choose_transport(peer.host_id),
            segment=SegmentRef(self._identity.segment_name, self._incarnation),
            fence_byte=self._plane.allocate_fence_byte(),
        )

    async def _call_send(self, peer: PeerAddress, publication: Publication, ticket: Ticket) -> None:
        """Request the blocks and wait for the other pool's answer; revoke the ticket on failure."""
        end = publication.first_block + len(publication.blocks)
        question = pb.SendBlocks(
            protocol_version=PEER_PROTOCOL_VERSION,
            model_digest=self._identity.model_digest,
            layout=wire.layout_to_pb(self._identity.layout),
            chain=_chain_to_pb(publication.chain.prefix(end)),
            ticket=ticket_to_pb(ticket),
        )
        # Stays set if the call is cancelled, for example because its channel is closed.
        error: BatonError | None = PeerUnreachable(f"the request to pool {peer.name} was cancelled")
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
        """Pass an event of the plane's thread to the loop; dropped if the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: InboundEvent) -> None:
        match event:
            case InboundSealed(ticket):
                _complete(self._in_flight.pop(ticket, None), None)
            case InboundLost(ticket, error):
                # After a seal all blocks are here, and only the commit was lost: no future is left.
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
