"""This pool's blocks on their way to another host's, which has asked for them: the path is pinned and written as a
prefill node writes a prompt's, by the transfer plane, and stays pinned until it is read no more."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from baton import wire
from baton.block_hash import BlockHash
from baton.clock import Clock
from baton.errors import BatonError, Cancelled, Incomplete, InvalidRequest, LayoutMismatch, Overloaded, Stale
from baton.failpoints import FAILPOINTS
from baton.pb import pool_pb2 as pb
from baton.types import AttemptKey, BlockIndex, Incarnation, Ticket
from kv_pool.core.chain import Chain
from kv_pool.core.holders import Holder
from kv_pool.core.pool import Pool
from kv_pool.terms import PEER_PROTOCOL_VERSION, PoolIdentity
from kv_transfer.plane import Aborted, Committed, OutboundEvent, OutboundPlane, SealInfo

HOLDER = Holder("sent to other pools")
MOST = 16  # at a time; more are refused

MakePlane = Callable[[Callable[[OutboundEvent], None]], OutboundPlane]


class Sender:
    """Belongs to one event loop. `make_plane` is given what to call with events, from any thread."""

    def __init__(self, make_plane: MakePlane, me: PoolIdentity, pool: Pool, clock: Clock) -> None:
        self._loop = asyncio.get_running_loop()
        self._plane = make_plane(self._emit)
        self._me = me
        self._pool = pool
        self._clock = clock
        self._incarnation = Incarnation("")
        self._under_way: dict[AttemptKey, asyncio.Future[None]] = {}
        self.totals = {"baton_pool_sent_blocks_total": 0.0}
        pool.attach(HOLDER, clock())

    def rejoin(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._plane.rejoin(incarnation)

    async def send(self, asked: pb.SendBlocks) -> None:
        """Returns once the other pool has committed. Raises BatonError if it has not, or what it asks for is not
        here."""
        ticket, chain = self._checked(asked)
        ended = self._begin(ticket, chain)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._plane.abort(ticket.key, Cancelled("the pool that asked is gone or wants it no more"))
            raise
        self.totals["baton_pool_sent_blocks_total"] += len(ticket.offsets)

    def counters(self) -> dict[str, float]:
        return self._plane.counters()

    async def close(self) -> None:
        await asyncio.to_thread(self._plane.close)

    def _checked(self, asked: pb.SendBlocks) -> tuple[Ticket, Chain]:
        me, layout = self._me, self._me.layout
        for field, theirs, ours in (
            ("protocol_version", asked.protocol_version, PEER_PROTOCOL_VERSION),
            ("model_digest", asked.model_digest, me.digest),
            ("layout", wire.layout_from_pb(asked.layout), layout),
        ):
            if theirs != ours:
                raise LayoutMismatch(f"{field} is {theirs!r}, pool {me.name} has {ours!r}")
        ticket = wire.ticket_from_pb(asked.ticket)
        if not self._incarnation or ticket.writer != self._incarnation:
            raise Stale(f"pool {me.name} is incarnation {self._incarnation!r}, the ticket is for {ticket.writer!r}")
        chain = Chain(BlockHash(asked.chain.root), asked.chain.names, asked.chain.tokens, layout.block_size)
        end = ticket.first_block + len(ticket.offsets)
        if not ticket.offsets or len(chain) != end or ticket.num_tokens != end * layout.block_size:
            raise InvalidRequest(f"a ticket up to block {end} for a chain of {len(chain)} blocks")
        if ticket.transport == "shm":
            raise InvalidRequest("a pool writes to no segment of another host: transport shm")
        return ticket, chain

    def _begin(self, ticket: Ticket, chain: Chain) -> "asyncio.Future[None]":
        if ticket.key in self._under_way or len(self._under_way) >= MOST:
            raise Overloaded(f"pool {self._me.name} sends {len(self._under_way)} times, at most {MOST}")
        found = self._pool.find(HOLDER, chain, ticket.num_tokens, self._clock(), partial=False)
        pin = found.pin
        ended: asyncio.Future[None] = self._loop.create_future()
        if pin is not None:
            ended.add_done_callback(lambda _: self._pool.release(HOLDER, pin))
        try:
            if len(found.blocks) < len(chain):
                raise Incomplete(f"pool {self._me.name} has {len(found.blocks)} of {len(chain)} blocks")
            FAILPOINTS.hit("pool.send.before")
        except BatonError:
            ended.cancel()
            raise
        ended.add_done_callback(_look)
        self._under_way[ticket.key] = ended
        self._write(ticket, [BlockIndex(block) for block in found.blocks[ticket.first_block :]])
        return ended

    def _write(self, ticket: Ticket, sources: list[BlockIndex]) -> None:
        """All of it is there: only queues."""
        plane = self._plane
        plane.open(ticket.key, ticket.num_tokens)
        plane.ticket(ticket.key, ticket)
        for layer in range(self._me.layout.num_layers):
            plane.layer_ready(ticket.key, layer, ticket.first_block, sources)
        plane.seal(ticket.key, SealInfo(()))

    def _emit(self, event: OutboundEvent) -> None:
        """From the plane's thread. A loop that has ended has nobody left to tell."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._happened, event)

    def _happened(self, event: OutboundEvent) -> None:
        match event:
            case Committed(key):
                self._under_way.pop(key).set_result(None)
            case Aborted(key, error):
                self._under_way.pop(key).set_exception(error)
            case _:
                pass


def _look(ended: "asyncio.Future[None]") -> None:
    """Whoever asked may be gone: then nobody else looks at it."""
    if not ended.cancelled():
        ended.exception()
