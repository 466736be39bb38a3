"""A decode role on a test bench."""

from typing import Any

from baton.cluster_link.messages import (
    DecodeOrder,
)
from baton.types import AttemptSpec, BlockIndex, Ticket
from decode_node.decode_role import DecodeRole
from kv_transfer.plane import InboundLost, InboundSealed, InboundStarted, SealInfo
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedEngine
from tests.paced_reference import paced_reference_tokens
from tests.unit.node_roles.role_bench import (
    WRITER,
    FakeInbound,
    RoleBench,
    tokens_of,
)


class DecodeBench(RoleBench):
    def __init__(self, **sizes: Any) -> None:
        self.plane = FakeInbound()
        super().__init__(lambda context: DecodeRole(context, self.plane), **sizes)

    @property
    def ticket(self) -> Ticket:
        (ticket,) = [
            each for each in self.plane.granted.values() if each.id not in self.plane.committed
        ]
        return ticket

    def land_handoff(self, ticket: Ticket, work: AttemptSpec) -> None:
        """Put into the ticket's blocks what a writer would have: computed by an engine of its
        own."""
        context = work.context_token_ids
        count = PACED_LAYOUT.count_blocks(len(context))
        writer, arena = (
            PacedEngine(ZERO_COSTS, vocab_size=1000),
            bytearray(count * PACED_LAYOUT.block_bytes),
        )
        writer.bind_cache(memoryview(arena), count)
        spec = SampleSpec(work.request.sampling, 0, len(context))
        blocks = tuple(map(BlockIndex, range(count)))
        writer.run(StepBatch((SequenceSlice(SequenceId(0), context, 0, blocks, spec),)))
        size = PACED_LAYOUT.block_bytes
        for number, offset in enumerate(ticket.block_offsets, ticket.first_block):
            self.arena[offset : offset + size] = arena[number * size : (number + 1) * size]

    def report_lost_tickets(self) -> None:
        for ticket, error in tuple(self.plane.revoked.items()):
            if ticket not in self.plane.committed:
                self.send_item(InboundLost(ticket, error, is_fenced=True))
        self.plane.revoked.clear()


def make_seal(work: AttemptSpec) -> SealInfo:
    return SealInfo(
        (*work.emitted_token_ids, *paced_reference_tokens(work.context_token_ids, 1, 1000))
    )


def run(node: DecodeBench, work: AttemptSpec) -> list[int]:
    """Step to the end; the tokens in order, their indexes checked."""
    while node.step():
        pass
    pairs = [pair for message in node.pop_messages("tokens") for pair in tokens_of(message)]
    assert [index for index, _ in pairs] == list(
        range(len(work.emitted_token_ids), len(work.emitted_token_ids) + len(pairs))
    )
    return [token for _, token in pairs]


def hand_over(node: DecodeBench, work: AttemptSpec) -> None:
    node.send_item(DecodeOrder(work, WRITER))
    ticket = node.ticket
    node.send_item(InboundStarted(ticket.id))
    node.land_handoff(ticket, work)
    node.send_item(InboundSealed(ticket.id, make_seal(work), 1))
