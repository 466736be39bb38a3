"""What becomes of a promotion's ticket, over a plane that says what it is told."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from baton.errors import StaleMessage
from baton.kv.blocks import KVLayout
from baton.types import Incarnation, NodeName, PeerAddress, Ticket, TicketId
from kv_pool.common.grpc_link import PeerChannels
from kv_pool.common.protocol import PoolIdentity
from kv_pool.core.blocks.attachments import Publication
from kv_pool.peers.promotion_receiver import PromotionReceiver
from kv_transfer.plane import InboundEvent, InboundLost, InboundPlane, InboundSealed, SealInfo
from tests.unit.kv_pool.core.chains import PROMPT_BLOCK_TOKENS, make_block_chain

pytestmark = pytest.mark.asyncio

LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=4, block_size=PROMPT_BLOCK_TOKENS, dtype="float32"
)
THERE = PeerAddress(NodeName("pool-1"), Incarnation("there"), "host-b", "b:1")


class FakeInboundPlane:
    endpoint = "tcp://127.0.0.1:1"

    def __init__(self, emit: Callable[[InboundEvent], None]) -> None:
        self.emit = emit
        self.granted: list[Ticket] = []
        self.committed: list[TicketId] = []

    def rejoin(self, incarnation: Incarnation) -> None: ...
    def revoke_ticket(self, ticket: TicketId, error: Exception) -> None: ...
    def close(self) -> None: ...

    def choose_transport(self, host_id: str) -> str:
        return "zmq"

    def allocate_fence_byte(self) -> int:
        return 0

    def grant_ticket(self, ticket: Ticket) -> None:
        self.granted.append(ticket)

    def commit_ticket(self, ticket: TicketId) -> None:
        self.committed.append(ticket)


class UnresponsiveChannels:
    """Channels to pools that never answer."""

    async def get_channel(self, _: str) -> Any:
        await asyncio.Event().wait()

    async def close(self) -> None: ...


async def test_fetch_succeeds_when_sealed_before_the_ticket_was_lost() -> None:
    """This pool joins anew in between: the plane then says both."""
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    planes: list[FakeInboundPlane] = []

    def make(emit: Callable[[InboundEvent], None]) -> InboundPlane:
        planes.append(FakeInboundPlane(emit))
        return cast(InboundPlane, planes[0])

    me = PoolIdentity(NodeName("pool-0"), "host-a", "segment", "11" * 32, LAYOUT)
    receiver = PromotionReceiver(make, me, cast(PeerChannels, UnresponsiveChannels()), 5.0)
    receiver.rejoin(Incarnation("here"))
    (plane,) = planes
    fetching = asyncio.create_task(
        receiver.fetch_blocks(THERE, Publication(make_block_chain(1, 2), 0, (3, 4), -1))
    )
    await asyncio.sleep(0)
    (ticket,) = plane.granted
    plane.emit(InboundSealed(ticket.id, SealInfo(()), 1))
    plane.emit(InboundLost(ticket.id, StaleMessage("this pool has joined anew"), is_fenced=True))
    async with asyncio.timeout(30):
        await fetching
    assert plane.committed == [ticket.id]
    await receiver.close()
    assert wrong == []
