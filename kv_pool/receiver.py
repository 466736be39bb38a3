"""Blocks on their way from another host's pool into this one's segment, as a hand-off is on its way to a decode node:
this pool grants a ticket for places, asks the other one to write them, and nothing counts before it is sealed.

Transports between hosts are two-sided. All that lands lands by this pool's own hand, so once a ticket is lost nothing
is written there any more.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from baton import wire
from baton.errors import BatonError, HandoffFailed, PeerGone
from baton.pb import pool_pb2 as pb
from baton.pb import pool_pb2_grpc
from baton.types import AttemptKey, Incarnation, PeerAddress, RequestId, SegmentRef, Ticket, TicketId, mint_id
from kv_pool.core.chain import Chain
from kv_pool.core.holders import Publication
from kv_pool.link import Channels
from kv_pool.terms import PEER_PROTOCOL_VERSION, PoolIdentity
from kv_transfer.plane import InboundEvent, InboundPlane, Lost, Sealed

MakePlane = Callable[[Callable[[InboundEvent], None]], InboundPlane]


class Receiver:
    """Belongs to one event loop. `make_plane` is given what to call with events, from any thread."""

    def __init__(self, make_plane: MakePlane, me: PoolIdentity, channels: Channels, ticket_ttl: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = make_plane(self._emit)
        self._me = me
        self._channels = channels
        self._ttl = ticket_ttl
        self._incarnation = Incarnation("")
        self._landing: dict[TicketId, asyncio.Future[None]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def joined(self) -> bool:
        """Tickets can be granted: there is an incarnation to bind them to."""
        return bool(self._incarnation)

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._plane.rejoin(incarnation)

    async def fetch(self, peer: PeerAddress, written: Publication) -> None:
        """Once joined: fill the places of a publication with what `peer` has. Raises BatonError if it does not come, or
        not whole; either way nothing is written to them afterwards."""
        ticket = self._ticket(peer, written)
        landed = self._landing[ticket.id] = self._loop.create_future()
        self._plane.grant(ticket)
        asking = asyncio.create_task(self._ask(peer, written, ticket))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            await landed
        except BatonError:
            asking.cancel()
            raise
        self._plane.commit(ticket.id)

    def counters(self) -> dict[str, float]:
        return self._plane.counters()

    async def close(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.to_thread(self._plane.close)
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._channels.close()

    def _ticket(self, peer: PeerAddress, written: Publication) -> Ticket:
        size = self._me.layout.block_bytes
        me = PeerAddress(self._me.name, self._incarnation, self._me.host_id, self._plane.endpoint)
        end = written.first + len(written.blocks)
        return Ticket(
            id=TicketId(mint_id()),
            key=AttemptKey(RequestId(mint_id()), 1, 0),
            decode=me,
            writer=peer.incarnation,
            first_block=written.first,
            offsets=tuple(block * size for block in written.blocks),
            num_tokens=end * self._me.layout.block_size,
            ttl=self._ttl,
            transport=self._plane.choose_transport(peer.host_id),
            segment=SegmentRef(self._me.segment, self._incarnation),
            fence=self._plane.mint_fence(),
        )

    async def _ask(self, peer: PeerAddress, written: Publication, ticket: Ticket) -> None:
        """To its end, which the other pool tells. If it is not a good one, the ticket is lost."""
        end = written.first + len(written.blocks)
        question = pb.SendBlocks(
            protocol_version=PEER_PROTOCOL_VERSION,
            model_digest=self._me.digest,
            layout=wire.layout_to_pb(self._me.layout),
            chain=_chain_to_pb(written.chain.beginning(end)),
            ticket=wire.ticket_to_pb(ticket),
        )
        error: BatonError | None = PeerGone(f"pool {peer.name} is asked no further")  # the channel is closed under it
        try:
            channel = await self._channels.to(peer.transfer_endpoint)
            try:
                answer = await pool_pb2_grpc.PoolPeersStub(channel).Send(question)
            except grpc.aio.AioRpcError as failure:
                error = PeerGone(f"pool {peer.name} at {peer.transfer_endpoint}: {failure.code().name}")
                await self._channels.drop(peer.transfer_endpoint, channel)
            else:
                error = wire.error_from_pb(answer.error) if answer.HasField("error") else None
        finally:
            if error is not None:
                self._plane.revoke(ticket.id, error)

    def _emit(self, event: InboundEvent) -> None:
        """From the plane's thread. A loop that has ended has nobody left to tell."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._happened, event)

    def _happened(self, event: InboundEvent) -> None:
        match event:
            case Sealed(ticket):
                _end(self._landing.pop(ticket, None), None)
            case Lost(ticket, error):  # if it was sealed before, all of it is there, and only the commit is lost
                _end(self._landing.pop(ticket, None), error)
            case _:
                pass


def _end(landed: "asyncio.Future[None] | None", error: BatonError | None) -> None:
    if landed is None or landed.done():
        return
    if error is None:
        landed.set_result(None)
    else:
        landed.set_exception(error if error.replaceable else HandoffFailed(error.message))


def _chain_to_pb(chain: Chain) -> pb.Chain:
    return pb.Chain(root=chain.root, names=chain.names, tokens=chain.tokens)
