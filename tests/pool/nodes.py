"""Prefill and decode nodes of one process on one pool, stepped by hand; hand-offs copy what the planes would."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton import wire
from baton.errors import Cancelled
from baton.types import AttemptKey, TicketId, Work
from decode_node.role import DecodeRole
from kv_transfer.plane import Aborted, Committed, Lost, OutboundReport, Sealed, Started
from node_engine.core.messages import Cancel, GiveTicket, Prefill, Submit
from node_engine.paced import PACED_LAYOUT, paced_reference
from prefill_node.role import PrefillRole
from tests.pool.in_process import PoolInProcess
from tests.unit.roles.bench import WRITER, Bench, FakeInbound, FakeOutbound

BLOCK = PACED_LAYOUT.block_size
VOCAB = 1000
_REPORT = OutboundReport("memory", 1, 1, 1, 0.0, 0.0)


class PrefillNode(Bench):
    def __init__(self, shared: PoolInProcess, **options: Any) -> None:
        self.plane = FakeOutbound()
        super().__init__(lambda parts: PrefillRole(parts, self.plane), shared=shared, **options)

    def let_go(self) -> None:
        for key, error in tuple(self.plane.aborted.items()):
            del self.plane.aborted[key]
            self.tell(Aborted(key, error))


class DecodeNode(Bench):
    def __init__(self, shared: PoolInProcess, **options: Any) -> None:
        self.plane = FakeInbound()
        self.got: dict[AttemptKey, list[int]] = {}
        super().__init__(lambda parts: DecodeRole(parts, self.plane), shared=shared, **options)

    def drop_revoked(self) -> None:
        for ticket, error in tuple(self.plane.revoked.items()):
            del self.plane.revoked[ticket]
            self.tell(Lost(ticket, error, fenced=True))

    def output(self, key: AttemptKey) -> list[int]:
        for message in self.take("tokens"):
            for token in message.tokens:
                found = wire.key_from_pb(token.key)
                tokens = self.got.setdefault(found, [])
                assert token.index == len(tokens)
                tokens.append(token.token)
        return self.got.get(key, [])


class Host:
    """Nodes of one host. `in_place` is false where kernels cannot read the pool."""

    def __init__(
        self, folder: Path, *, prefill: int = 1, decode: int = 1, pool_blocks: int = 256, **options: Any
    ) -> None:
        self.pool = PoolInProcess(folder, PACED_LAYOUT, pool_blocks)
        self.prefill = [PrefillNode(self.pool, **options) for _ in range(prefill)]
        self.decode = [DecodeNode(self.pool, **options) for _ in range(decode)]

    @property
    def nodes(self) -> Sequence[Bench]:
        return (*self.prefill, *self.decode)

    def settle(self) -> None:
        """Publications are carried out, and every node hears of its own."""
        while True:
            self.pool.settle()
            if not any(node.inbox for node in self.nodes):
                return
            for node in self.nodes:
                node.receive()

    def check(self, *, idle: bool = True) -> None:
        """Books of nodes and pool agree. `idle`: nobody holds anything."""
        self.pool.check()
        for node in self.nodes:
            node.pool.check()
            if idle:
                assert node.held() == {}, node.pool.ledger()
        if idle:
            assert self.pool.pinned == 0

    def serve(
        self, job: Work, prefill: int = 0, decode: int = 0, while_running: Callable[[], None] | None = None
    ) -> list[int]:
        """One request through both legs, to its end. Returns its tokens."""
        sender, receiver = self.prefill[prefill], self.decode[decode]
        receiver.tell(Submit(job, WRITER))
        sender.tell(Prefill(job, alone=False))
        (reserved,) = receiver.take("reserved")
        if not reserved.HasField("ticket"):
            sender.tell(_cancel(job))
            sender.let_go()
        else:
            ticket = receiver.plane.granted[TicketId(reserved.ticket.id)]
            sender.tell(GiveTicket(ticket))
            while sender.step():
                pass
            self.land(sender, receiver, job.key)
        while receiver.step():
            if while_running is not None:
                while_running()
        return receiver.output(job.key)

    def land(self, sender: PrefillNode, receiver: DecodeNode, key: AttemptKey) -> None:
        ticket = next(each for each in reversed(receiver.plane.granted.values()) if each.key == key)
        size = PACED_LAYOUT.block_bytes
        receiver.tell(Started(ticket.id))
        for layer, first, source in sender.plane.ready[key]:
            for number, block in enumerate(source, first):
                if layer == 0 and number >= ticket.first_block:
                    offset = ticket.offsets[number - ticket.first_block]
                    receiver.reach[offset : offset + size] = sender.reach[block * size : (block + 1) * size]
        receiver.tell(Sealed(ticket.id, sender.plane.sealed[key], 0))
        sender.tell(Committed(key, _REPORT))

    def close(self) -> None:
        for node in self.nodes:
            node.segment.close()
        self.pool.close()


def _cancel(job: Work) -> Any:
    return Cancel(job.key, Cancelled("decode has all of it"))


def reference(job: Work) -> list[int]:
    return paced_reference(job.context, job.request.sampling.max_tokens - len(job.emitted), VOCAB)
