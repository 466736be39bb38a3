"""Sending of blocks to another host's pool at its request, by the transfer plane.

The blocks are pinned and written as a prefill node writes those of a prompt; they stay pinned until
the transfer plane has stopped reading them.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.order_codec import ticket_from_pb
from baton.errors import (
    BatonError,
    Cancelled,
    IncompleteTransfer,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    StaleMessage,
)
from baton.kv.blocks import BlockHash
from baton.pb import pool_pb2 as pb
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_pool.common.protocol import PEER_PROTOCOL_VERSION, PoolIdentity
from kv_pool.core.blocks.attachments import PoolClientId
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.index.radix_index import PromptChain
from kv_transfer.plane import (
    OutboundAborted,
    OutboundCommitted,
    OutboundEvent,
    OutboundPlane,
    SealInfo,
)

SENDER_CLIENT_ID = PoolClientId("sent to other pools")  # as operators see it in ledgers
MAX_SENDS = 16  # at the same time; more are refused

MakeOutboundPlane = Callable[[Callable[[OutboundEvent], None]], OutboundPlane]


class PromotionSender:
    """Sends blocks to other hosts' pools. Belongs to one event loop.

    `make_plane` gets a callback for the plane's events, which may be called from any thread.
    """

    def __init__(
        self,
        make_plane: MakeOutboundPlane,
        identity: PoolIdentity,
        pool: SharedBlockPool,
        clock: Clock,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = make_plane(self._emit)
        self._identity = identity
        self._pool = pool
        self._clock = clock
        self._incarnation = Incarnation("")
        self._in_flight: dict[AttemptKey, asyncio.Future[None]] = {}
        self.block_counters = {"baton_pool_sent_blocks_total": 0.0}
        pool.attachments.attach_client(SENDER_CLIENT_ID, clock())

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._plane.rejoin(incarnation)

    async def send_blocks(self, request: pb.SendBlocks) -> None:
        """Send the requested blocks; returns once the other pool has committed them.

        Raises BatonError if the transfer fails, or if a requested block is not in memory.
        """
        ticket, chain = self._validate(request)
        ended = self._start_send(ticket, chain)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._plane.abort_handoff(
                ticket.key, Cancelled("the requesting pool has cancelled or is gone")
            )
            raise
        self.block_counters["baton_pool_sent_blocks_total"] += len(ticket.block_offsets)

    def counters(self) -> dict[str, float]:
        return self._plane.counters()

    async def close(self) -> None:
        await asyncio.to_thread(self._plane.close)

    def _validate(self, request: pb.SendBlocks) -> tuple[Ticket, PromptChain]:
        """Check a request against this pool; returns its ticket and chain."""
        pool, layout = self._identity, self._identity.layout
        for field, requested, own in (
            ("protocol_version", request.protocol_version, PEER_PROTOCOL_VERSION),
            ("model_digest", request.model_digest, pool.model_digest),
            ("layout", wire.layout_from_pb(request.layout), layout),
        ):
            if requested != own:
                raise LayoutMismatch(f"{field} is {requested!r}, pool {pool.name} has {own!r}")
        ticket = ticket_from_pb(request.ticket)
        if not self._incarnation or ticket.writer_incarnation != self._incarnation:
            raise StaleMessage(
                f"pool {pool.name} is incarnation {self._incarnation!r}, "
                f"the ticket is for {ticket.writer_incarnation!r}"
            )
        chain = PromptChain(
            BlockHash(request.chain.root),
            request.chain.names,
            request.chain.tokens,
            layout.block_size,
        )
        end = ticket.first_block + len(ticket.block_offsets)
        if (
            not ticket.block_offsets
            or len(chain) != end
            or ticket.num_tokens != end * layout.block_size
        ):
            raise InvalidRequest(f"a ticket up to block {end} for a chain of {len(chain)} blocks")
        if ticket.transport == "shm":
            raise InvalidRequest("transport shm: a pool cannot write to a segment of another host")
        return ticket, chain

    def _start_send(self, ticket: Ticket, chain: PromptChain) -> "asyncio.Future[None]":
        """Pin the blocks and start writing them; the future ends when they are read no more."""
        if ticket.key in self._in_flight or len(self._in_flight) >= MAX_SENDS:
            raise Overloaded(
                f"pool {self._identity.name} has {len(self._in_flight)} sends in flight, "
                f"at most {MAX_SENDS}"
            )
        found = self._pool.find_prefix(
            SENDER_CLIENT_ID, chain, ticket.num_tokens, self._clock(), partial=False
        )
        pin = found.pin_id
        ended: asyncio.Future[None] = self._loop.create_future()
        if pin is not None:
            ended.add_done_callback(lambda _: self._pool.release_pin(SENDER_CLIENT_ID, pin))
        try:
            if len(found.blocks) < len(chain):
                raise IncompleteTransfer(
                    f"pool {self._identity.name} has {len(found.blocks)} of {len(chain)} blocks"
                )
            FAILPOINTS.hit("pool.send.before")
        except BatonError:
            ended.cancel()
            raise
        ended.add_done_callback(_consume_exception)
        self._in_flight[ticket.key] = ended
        self._write_blocks(
            ticket, [BlockIndex(block) for block in found.blocks[ticket.first_block :]]
        )
        return ended

    def _write_blocks(self, ticket: Ticket, sources: list[BlockIndex]) -> None:
        """Queue all layers of the blocks at once; they are complete."""
        plane = self._plane
        plane.open_handoff(ticket.key, ticket.num_tokens)
        plane.set_ticket(ticket.key, ticket)
        for layer in range(self._identity.layout.num_layers):
            plane.announce_layer(ticket.key, layer, ticket.first_block, sources)
        plane.seal_handoff(ticket.key, SealInfo(()))

    def _emit(self, event: OutboundEvent) -> None:
        """Pass an event of the plane's thread to the loop; dropped if the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_event, event)

    def _on_event(self, event: OutboundEvent) -> None:
        match event:
            case OutboundCommitted(key):
                self._in_flight.pop(key).set_result(None)
            case OutboundAborted(key, error):
                self._in_flight.pop(key).set_exception(error)
            case _:
                pass


def _consume_exception(ended: "asyncio.Future[None]") -> None:
    """Mark an exception as retrieved: the caller may not wait for the future any more."""
    if not ended.cancelled():
        ended.exception()
