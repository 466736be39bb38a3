"""A role under test with everything real but the planes and the coordinator: pool, scheduler and paced engine, stepped
by hand. The fake planes record what they are told and answer only when the test lets them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from baton.addressing import AddressSpace
from baton.block_hash import root_hash
from baton.clock import FakeClock
from baton.config import Config
from baton.errors import BatonError
from baton.pb import cluster_pb2
from baton.segment import create, segment_bytes
from baton.types import (
    AttemptKey,
    BlockIndex,
    Incarnation,
    NodeName,
    PeerAddress,
    Request,
    RequestId,
    SamplingParams,
    Ticket,
    TicketId,
    Work,
)
from kv_transfer.plane import SealInfo
from node_engine.core.block_pool import BlockPool
from node_engine.core.ledger import BlockState
from node_engine.core.messages import Joined
from node_engine.core.scheduler import Scheduler, SchedulerLimits
from node_engine.host.block_copies import BlockCopies
from node_engine.host.lookups import Lookups
from node_engine.paced import FREE_OF_COST, PACED_LAYOUT, PacedEngine
from node_engine.reporter import Reporter
from node_engine.role import NodeParts, RolePolicy
from node_engine.sharing import Published, Sharing
from tests.pool.in_process import PoolInProcess, Port

VOCAB = 1000
MODEL = PacedEngine(FREE_OF_COST, vocab_size=VOCAB).identity.digest()  # what requests are bound to
INCARNATION = Incarnation("me")
NOBODY = Incarnation("")
WRITER = PeerAddress(NodeName("prefill-0"), Incarnation("writer"), "host", "tcp://127.0.0.1:1")


@dataclass
class FakeInbound:
    """Decode's plane: grants are remembered, and nothing lands by itself."""

    endpoint: str = "tcp://127.0.0.1:2"
    granted: dict[TicketId, Ticket] = field(default_factory=dict)
    revoked: dict[TicketId, BatonError] = field(default_factory=dict)
    committed: list[TicketId] = field(default_factory=list)
    incarnation: Incarnation = NOBODY
    gone: list[Incarnation] = field(default_factory=list)
    fences: int = 0

    def rejoin(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    def choose_transport(self, writer_host_id: str) -> str:
        return "memory"

    def mint_fence(self) -> int:
        self.fences += 1
        return self.fences

    def grant(self, ticket: Ticket) -> None:
        assert ticket.id not in self.granted
        self.granted[ticket.id] = ticket

    def commit(self, ticket: TicketId) -> None:
        self.committed.append(ticket)

    def revoke(self, ticket: TicketId, error: BatonError) -> None:
        self.revoked[ticket] = error

    def peer_gone(self, writer: Incarnation) -> None:
        self.gone.append(writer)

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass
class FakeOutbound:
    """Prefill's plane: remembers which slabs were announced, and from where."""

    endpoint: str = "tcp://127.0.0.1:3"
    opened: dict[AttemptKey, int] = field(default_factory=dict)
    tickets: dict[AttemptKey, Ticket] = field(default_factory=dict)
    ready: dict[AttemptKey, list[tuple[int, int, tuple[BlockIndex, ...]]]] = field(default_factory=dict)
    sealed: dict[AttemptKey, SealInfo] = field(default_factory=dict)
    aborted: dict[AttemptKey, BatonError] = field(default_factory=dict)
    incarnation: Incarnation = NOBODY

    def rejoin(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    def open(self, key: AttemptKey, num_tokens: int) -> None:
        self.opened[key] = num_tokens

    def ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self.tickets[key] = ticket

    def layer_ready(self, key: AttemptKey, layer: int, first: int, source: Sequence[BlockIndex]) -> None:
        self.ready.setdefault(key, []).append((layer, first, tuple(source)))

    def seal(self, key: AttemptKey, info: SealInfo) -> None:
        self.sealed[key] = info

    def abort(self, key: AttemptKey, error: BatonError) -> None:
        self.aborted.setdefault(key, error)

    def peer_gone(self, decode: Incarnation) -> None: ...

    def wait_landed(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        return True

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class Bench:
    """One node, stepped by hand. `sent` is what the coordinator would have received."""

    def __init__(
        self,
        make: Callable[[NodeParts], RolePolicy],
        num_blocks: int = 32,
        max_batched_tokens: int = 64,
        shared: PoolInProcess | None = None,
        in_place: bool = True,
    ) -> None:
        """`shared`: the pool of the node's host; with `in_place` its blocks are read where they are."""
        self.clock = FakeClock()
        self.engine = PacedEngine(FREE_OF_COST, vocab_size=VOCAB, max_model_len=4096)
        self.port: Port | None = None
        copy_in = None
        if shared is None:
            self.reach = memoryview(bytearray(num_blocks * PACED_LAYOUT.block_bytes))
        else:
            size = segment_bytes(num_blocks * PACED_LAYOUT.block_bytes, PACED_LAYOUT.block_bytes)
            self.segment = create(shared.folder, "arena", size)
            space = AddressSpace(PACED_LAYOUT.block_bytes, shared.folder, range_bytes=1 << 26)
            self.own = space.attach(self.segment.name)
            self.reach, self.port = space.view(), shared.port(space)
            if not in_place:
                copy_in = BlockCopies(self.reach, PACED_LAYOUT.block_bytes).copy
        self.engine.bind(self.reach, num_blocks)
        self.pool = BlockPool(num_blocks, PACED_LAYOUT.block_size, self.clock)
        limits = SchedulerLimits(8, max_batched_tokens, 4096)
        self.scheduler = Scheduler(self.pool, limits, self.engine.eos_token_ids, copy_in=copy_in)
        self.sharing = Sharing(self.port, self.pool, self.scheduler, self._put, in_place=in_place)
        self.lookups = Lookups(
            self.port,
            root_of=lambda job: root_hash(self.engine.model_digest, PACED_LAYOUT, job.request.cache_salt),
            block_size=PACED_LAYOUT.block_size,
            epoch=lambda: self.sharing.epoch,
            deliver=self._put,
        )
        self.inbox: deque[object] = deque()
        self.sent: list[cluster_pb2.NodeMessage] = []
        self.events: list[object] = []
        parts = NodeParts(
            config=Config(),
            name=NodeName("node"),
            host_id="host",
            engine=self.engine,
            arena=cast(Any, type("Arena", (), {"name": "baton-arena-x"})),
            pool=self.pool,
            scheduler=self.scheduler,
            report=Reporter("node", self.sent.append),
            clock=self.clock,
            sharing=self.sharing,
            reach=self.reach,
            emit=self.events.append,
        )
        self.arena = self.reach[: num_blocks * PACED_LAYOUT.block_bytes]
        self.role = make(parts)
        self.tell(Joined(INCARNATION))

    def tell(self, item: Any) -> None:
        """As the event loop and then the compute thread would."""
        if type(item).__module__.endswith("messages"):
            self.role.preview(item)
            self.lookups.take(item)
        else:
            self._put(item)
        self.receive()

    def receive(self) -> None:
        """What the compute thread does between two steps."""
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, Published):
                self.sharing.published(item)
            else:
                self.role.handle(item)

    def _put(self, item: object) -> None:
        self.inbox.append(item)

    def step(self) -> bool:
        """One turn of the compute thread; False if there was nothing to compute."""
        self.receive()
        plan = self.scheduler.next_step()
        if plan.outcomes:
            self.role.deliver(plan.outcomes)
        if plan.batch is None:
            return False
        on_layer = self.role.before_step(plan.batch)
        tokens = self.engine.run(plan.batch, on_layer)
        self.role.after_step(plan.batch, self.scheduler.update(plan.batch, tokens), 0.5)
        return True

    def take(self, kind: str) -> list[Any]:
        """The messages of one kind sent so far, which are then forgotten."""
        found = [getattr(message, kind) for message in self.sent if message.WhichOneof("message") == kind]
        self.sent[:] = [message for message in self.sent if message.WhichOneof("message") != kind]
        return found

    def held(self) -> dict[BlockState, int]:
        """Blocks that are neither free nor cached."""
        self.pool.check()
        idle = {BlockState.FREE, BlockState.CACHED}
        return {state: count for state, count in self.pool.counts().items() if count and state not in idle}


def work(
    prompt: Sequence[int],
    *,
    request: str = "r",
    attempt: int = 0,
    choice: int = 0,
    max_tokens: int = 4,
    emitted: Sequence[int] = (),
    **sampled: Any,
) -> Work:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampled)
    key = AttemptKey(RequestId(request), attempt, choice)
    asked = Request(key.request, tuple(prompt), sampling, 60.0, choice=choice)
    return Work(key, asked, tuple(emitted), model=MODEL)


def tokens_of(message: Any) -> list[tuple[int, int]]:
    return [(token.index, token.token) for token in message.tokens]
