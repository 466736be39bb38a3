"""Prefill and decode nodes of one process on one pool, stepped by the test.

Hand-offs copy what the planes would."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.cluster_link.messages import CancelOrder, DecodeOrder, PrefillOrder, TicketOrder
from baton.cluster_link.order_codec import attempt_key_from_pb
from baton.errors import Cancelled
from baton.types import AttemptKey, AttemptSpec, TicketId
from decode_node.decode_role import DecodeRole
from kv_transfer.plane import (
    HandoffStats,
    InboundLost,
    InboundSealed,
    InboundStarted,
    OutboundAborted,
    OutboundCommitted,
)
from node_engine.paced.paced_engine import PACED_LAYOUT
from prefill_node.prefill_role import PrefillRole
from tests.paced_reference import paced_reference_tokens
from tests.pool.in_process_pool import InProcessPool
from tests.unit.node_roles.role_bench import WRITER, FakeInbound, FakeOutbound, RoleBench

BLOCK_TOKENS = PACED_LAYOUT.block_size
VOCAB = 1000
_REPORT = HandoffStats("memory", 1, 1, 1, 0.0, 0.0)


class InProcessPrefillNode(RoleBench):
    def __init__(self, shared: InProcessPool, **options: Any) -> None:
        self.plane = FakeOutbound()
        super().__init__(lambda parts: PrefillRole(parts, self.plane), shared=shared, **options)

    def drop_aborted(self) -> None:
        for key, error in tuple(self.plane.aborted.items()):
            del self.plane.aborted[key]
            self.send_item(OutboundAborted(key, error))


class InProcessDecodeNode(RoleBench):
    def __init__(self, shared: InProcessPool, **options: Any) -> None:
        self.plane = FakeInbound()
        self.tokens_by_attempt: dict[AttemptKey, list[int]] = {}
        super().__init__(lambda parts: DecodeRole(parts, self.plane), shared=shared, **options)

    def drop_revoked(self) -> None:
        for ticket, error in tuple(self.plane.revoked.items()):
            del self.plane.revoked[ticket]
            self.send_item(InboundLost(ticket, error, is_fenced=True))

    def collect_tokens(self, key: AttemptKey) -> list[int]:
        for message in self.pop_messages("tokens"):
            for token in message.tokens:
                found = attempt_key_from_pb(token.key)
                tokens = self.tokens_by_attempt.setdefault(found, [])
                assert token.index == len(tokens)
                tokens.append(token.token)
        return self.tokens_by_attempt.get(key, [])


class InProcessHost:
    """Nodes of one host. `in_place` is false where kernels cannot read the pool."""

    def __init__(
        self,
        folder: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        pool_blocks: int = 256,
        **options: Any,
    ) -> None:
        self.pool = InProcessPool(folder, PACED_LAYOUT, pool_blocks)
        self.prefill = [InProcessPrefillNode(self.pool, **options) for _ in range(prefill)]
        self.decode = [InProcessDecodeNode(self.pool, **options) for _ in range(decode)]

    @property
    def nodes(self) -> Sequence[RoleBench]:
        return (*self.prefill, *self.decode)

    def run_publications(self) -> None:
        """Carry out publications, and report each to its node."""
        while True:
            self.pool.run_publications()
            if not any(node.inbox for node in self.nodes):
                return
            for node in self.nodes:
                node.drain_inbox()

    def check(self, *, idle: bool = True) -> None:
        """Check that the ledgers of nodes and pool agree; with `idle`, that nobody holds a
        block."""
        self.pool.check()
        for node in self.nodes:
            node.pool.check_invariants()
            if idle:
                assert node.count_held_blocks() == {}, node.pool.take_ledger()
        if idle:
            assert self.pool.num_pins == 0

    def serve_request(
        self,
        job: AttemptSpec,
        prefill: int = 0,
        decode: int = 0,
        while_running: Callable[[], None] | None = None,
    ) -> list[int]:
        """Run one request through both legs to its end, and return its tokens."""
        sender, receiver = self.prefill[prefill], self.decode[decode]
        receiver.send_item(DecodeOrder(job, WRITER))
        sender.send_item(PrefillOrder(job, needs_no_decode=False))
        (reserved,) = receiver.pop_messages("reserved")
        if not reserved.HasField("ticket"):
            sender.send_item(_cancel(job))
            sender.drop_aborted()
        else:
            ticket = receiver.plane.granted[TicketId(reserved.ticket.id)]
            sender.send_item(TicketOrder(ticket))
            while sender.step():
                pass
            self.land_handoff(sender, receiver, job.key)
        while receiver.step():
            if while_running is not None:
                while_running()
        return receiver.collect_tokens(job.key)

    def land_handoff(
        self, sender: InProcessPrefillNode, receiver: InProcessDecodeNode, key: AttemptKey
    ) -> None:
        ticket = next(
            candidate
            for candidate in reversed(receiver.plane.granted.values())
            if candidate.key == key
        )
        size = PACED_LAYOUT.block_bytes
        receiver.send_item(InboundStarted(ticket.id))
        for layer, first, source in sender.plane.ready[key]:
            for number, block in enumerate(source, first):
                if layer == 0 and number >= ticket.first_block:
                    offset = ticket.block_offsets[number - ticket.first_block]
                    receiver.block_memory[offset : offset + size] = sender.block_memory[
                        block * size : (block + 1) * size
                    ]
        receiver.send_item(InboundSealed(ticket.id, sender.plane.sealed[key], 0))
        sender.send_item(OutboundCommitted(key, _REPORT))

    def close(self) -> None:
        for node in self.nodes:
            node.segment.close()
        self.pool.close()


def _cancel(job: AttemptSpec) -> Any:
    return CancelOrder(job.key, Cancelled("decode has all of it"))


def reference_tokens(job: AttemptSpec) -> list[int]:
    return paced_reference_tokens(
        job.context_token_ids, job.request.sampling.max_tokens - len(job.emitted_token_ids), VOCAB
    )
