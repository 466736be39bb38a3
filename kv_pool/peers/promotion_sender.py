"""This pool's blocks on their way to another host's, which has asked for them: the path is pinned
and written as a prefill node writes a prompt's, by the transfer plane, and stays pinned until it is
read no more."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton.cluster_link import pb_conversion as wire
from baton.errors import (
    BatonError,
    Cancelled,
    IncompleteTransfer,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    StaleMessage,
)
from baton.kv.block_hash import BlockHash
from baton.pb import pool_pb2 as pb
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_pool.common.protocol import PEER_PROTOCOL_VERSION, PoolIdentity
from kv_pool.core.blocks.attachments import PoolClientId
from kv_pool.core.blocks.shared_block_pool import SharedBlockPool
from kv_pool.core.index.prompt_chain import PromptChain
from kv_transfer.plane import (
    OutboundAborted,
    OutboundCommitted,
    OutboundEvent,
    OutboundPlane,
    SealInfo,
)

SENDER_CLIENT_ID = PoolClientId("sent to other pools")
MAX_SENDS = 16  # at a time; more are refused

MakeOutboundPlane = Callable[[Callable[[OutboundEvent], None]], OutboundPlane]


class PromotionSender:
    """Belongs to one event loop. `make_plane` is given what to call with events, from any
    thread."""

    def __init__(
        self, make_plane: MakeOutboundPlane, me: PoolIdentity, pool: SharedBlockPool, clock: Clock
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = make_plane(self._emit)
        self._identity = me
        self._pool = pool
        self._clock = clock
        self._incarnation = Incarnation("")
        self._in_flight: dict[AttemptKey, asyncio.Future[None]] = {}
        self.block_counters = {"baton_pool_sent_blocks_total": 0.0}
        pool.attach_client(SENDER_CLIENT_ID, clock())

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._plane.rejoin(incarnation)

    async def send_blocks(self, asked: pb.SendBlocks) -> None:
        """Returns once the other pool has committed. Raises BatonError if it has not, or what it
        asks for is not here."""
        ticket, chain = self._validate(asked)
        ended = self._start_send(ticket, chain)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._plane.abort_handoff(
                ticket.key, Cancelled("the pool that asked is gone or wants it no more")
            )
            raise
        self.block_counters["baton_pool_sent_blocks_total"] += len(ticket.block_offsets)

    def counters(self) -> dict[str, float]:
        return self._plane.counters()

    async def close(self) -> None:
        await asyncio.to_thread(self._plane.close)

    def _validate(self, asked: pb.SendBlocks) -> tuple[Ticket, PromptChain]:
        me, layout = self._identity, self._identity.layout
        for field, theirs, ours in (
            ("protocol_version", asked.protocol_version, PEER_PROTOCOL_VERSION),
            ("model_digest", asked.model_digest, me.model_digest),
            ("layout", wire.layout_from_pb(asked.layout), layout),
        ):
            if theirs != ours:
                raise LayoutMismatch(f"{field} is {theirs!r}, pool {me.name} has {ours!r}")
        ticket = wire.ticket_from_pb(asked.ticket)
        if not self._incarnation or ticket.writer_incarnation != self._incarnation:
            raise StaleMessage(
                f"pool {me.name} is incarnation {self._incarnation!r}, the ticket is for {ticket.writer_incarnation!r}"
            )
        chain = PromptChain(
            BlockHash(asked.chain.root), asked.chain.names, asked.chain.tokens, layout.block_size
        )
        end = ticket.first_block + len(ticket.block_offsets)
        if (
            not ticket.block_offsets
            or len(chain) != end
            or ticket.num_tokens != end * layout.block_size
        ):
            raise InvalidRequest(f"a ticket up to block {end} for a chain of {len(chain)} blocks")
        if ticket.transport == "shm":
            raise InvalidRequest("a pool writes to no segment of another host: transport shm")
        return ticket, chain

    def _start_send(self, ticket: Ticket, chain: PromptChain) -> "asyncio.Future[None]":
        if ticket.key in self._in_flight or len(self._in_flight) >= MAX_SENDS:
            raise Overloaded(
                f"pool {self._identity.name} sends {len(self._in_flight)} times, at most {MAX_SENDS}"
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
        """All of it is there: only queues."""
        plane = self._plane
        plane.open_handoff(ticket.key, ticket.num_tokens)
        plane.set_ticket(ticket.key, ticket)
        for layer in range(self._identity.layout.num_layers):
            plane.announce_layer(ticket.key, layer, ticket.first_block, sources)
        plane.seal_handoff(ticket.key, SealInfo(()))

    def _emit(self, event: OutboundEvent) -> None:
        """From the plane's thread. A loop that has ended has nobody left to tell."""
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
    """Whoever asked may be gone: then nobody else looks at it."""
    if not ended.cancelled():
        ended.exception()
