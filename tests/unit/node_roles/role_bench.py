"""A role under test with everything real but the planes and the coordinator: pool, scheduler and
paced engine, stepped by hand. The fake planes record what they are told and answer only when the
test lets them."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from baton.cluster_link.messages import LedgerReport, NodeReport
from baton.cluster_link.report_codec import encode_report
from baton.config.settings import Config
from baton.errors import BatonError
from baton.pb import cluster_pb2
from baton.process.clock import FakeClock
from baton.shared_memory.addressing import BlockAddressSpace
from baton.shared_memory.segment import create_segment, round_up_segment_bytes
from baton.types import (
    AttemptKey,
    AttemptSpec,
    BlockIndex,
    Incarnation,
    NodeName,
    PeerAddress,
    Request,
    RequestId,
    SamplingParams,
    Ticket,
    TicketId,
)
from kv_transfer.plane import LinkCost, ReadyGate, SealInfo
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.node_commands import NodeCommand, NodeJoined
from node_engine.core.scheduling.capacity import SchedulerLimits
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.paced.costs import ZERO_COSTS
from node_engine.paced.paced_engine import PACED_LAYOUT, PacedEngine
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from node_engine.roles.role_policy import RoleContext, RolePolicy
from node_engine.shared_pool.pool_client import BlockCopier
from node_engine.shared_pool.pool_connector import PoolConnector, PoolLookups, PublicationEnded
from tests.pool.in_process_pool import FakePoolClient, InProcessPool

VOCAB = 1000
STEP_SECONDS = 0.5  # that each step takes, as the role is told
MODEL = PacedEngine(
    ZERO_COSTS, vocab_size=VOCAB
).model_identity.digest  # what requests are bound to
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
    transport: str = "memory"

    def rejoin(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    def choose_transport(self, writer_host_id: str, writer_endpoint: str | None = None) -> str:
        return self.transport

    def allocate_fence_byte(self) -> int:
        self.fences += 1
        return self.fences

    def grant_ticket(self, ticket: Ticket) -> None:
        assert ticket.id not in self.granted
        self.granted[ticket.id] = ticket

    def commit_ticket(self, ticket: TicketId) -> None:
        self.committed.append(ticket)

    def revoke_ticket(self, ticket: TicketId, error: BatonError) -> None:
        self.revoked[ticket] = error

    def on_peer_gone(self, writer: Incarnation) -> None:
        self.gone.append(writer)

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


@dataclass
class FakeOutbound:
    """Prefill's plane: remembers which slabs were announced, and from where."""

    endpoint: str = ""
    opened: dict[AttemptKey, int] = field(default_factory=dict)
    tickets: dict[AttemptKey, Ticket] = field(default_factory=dict)
    ready: dict[AttemptKey, list[tuple[int, int, tuple[BlockIndex, ...]]]] = field(
        default_factory=dict
    )
    sealed: dict[AttemptKey, SealInfo] = field(default_factory=dict)
    on_announce: Callable[[], None] = lambda: None
    groups: list[int] = field(default_factory=list)  # layers of each announcement
    link_cost: LinkCost = field(default_factory=LinkCost)
    aborted: dict[AttemptKey, BatonError] = field(default_factory=dict)
    incarnation: Incarnation = NOBODY

    def rejoin(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation

    def open_handoff(self, key: AttemptKey, num_tokens: int) -> None:
        self.opened[key] = num_tokens

    def set_ticket(self, key: AttemptKey, ticket: Ticket) -> None:
        self.tickets[key] = ticket

    def announce_layer(
        self,
        key: AttemptKey,
        layer: int,
        first: int,
        source: Sequence[BlockIndex],
        num_layers: int = 1,
        gate: ReadyGate | None = None,
    ) -> None:
        layers = range(layer, layer + num_layers)
        self.ready.setdefault(key, []).extend((each, first, tuple(source)) for each in layers)
        self.groups.append(num_layers)
        self.on_announce()

    def seal_handoff(self, key: AttemptKey, info: SealInfo) -> None:
        self.sealed[key] = info

    def abort_handoff(self, key: AttemptKey, error: BatonError) -> None:
        self.aborted.setdefault(key, error)

    def on_peer_gone(self, decode: Incarnation) -> None: ...

    def wait_for_layer(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        return True

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class RoleBench:
    """One node, stepped by hand. `sent_messages` is what the coordinator would have received."""

    def __init__(
        self,
        make: Callable[[RoleContext], RolePolicy],
        num_blocks: int = 32,
        max_batched_tokens: int = 64,
        shared: InProcessPool | None = None,
        in_place: bool = True,
        config: Config | None = None,
    ) -> None:
        """`shared`: the pool of the node's host; with `in_place` its blocks are read where they
        are."""
        self.clock = FakeClock()
        self.engine = PacedEngine(ZERO_COSTS, vocab_size=VOCAB, max_model_len=4096)
        self.pool_client: FakePoolClient | None = None
        copy_pool_blocks = None
        if shared is None:
            self.block_memory = memoryview(bytearray(num_blocks * PACED_LAYOUT.block_bytes))
        else:
            size = round_up_segment_bytes(
                num_blocks * PACED_LAYOUT.block_bytes, PACED_LAYOUT.block_bytes
            )
            self.segment = create_segment(shared.folder, "arena", size)
            space = BlockAddressSpace(PACED_LAYOUT.block_bytes, shared.folder, range_bytes=1 << 26)
            self.own_arena = space.attach_segment(self.segment.name)
            self.block_memory, self.pool_client = space.view_range(), shared.make_client(space)
            if not in_place:
                copy_pool_blocks = BlockCopier(
                    self.block_memory, PACED_LAYOUT.block_bytes
                ).copy_blocks
        self.engine.bind_cache(self.block_memory, num_blocks)
        self.pool = BlockPool(num_blocks, PACED_LAYOUT.block_size, self.clock)
        limits = SchedulerLimits(8, max_batched_tokens, 4096)
        self.scheduler = Scheduler(
            self.pool, limits, self.engine.eos_token_ids, copy_pool_blocks=copy_pool_blocks
        )
        self.pool_connector = PoolConnector(
            self.pool_client,
            self.pool,
            self.scheduler,
            self._put,
            save_blocks=self.engine.save_blocks,
            in_place=in_place,
        )
        self.submit_command: Callable[[NodeCommand], None] = self._put
        if self.pool_client is not None:
            self.submit_command = PoolLookups(
                self.pool_client, self.engine, self.pool_connector, self._put
            ).submit_command
        self.inbox: deque[object] = deque()
        self.sent_messages: list[cluster_pb2.NodeMessage] = []
        self.events: list[object] = []
        context = RoleContext(
            config=config or Config(),
            name=NodeName("node"),
            host_id="host",
            engine=self.engine,
            arena=cast(Any, type("Arena", (), {"name": "baton-arena-x"})),
            block_pool=self.pool,
            scheduler=self.scheduler,
            reporter=CoordinatorReporter(NodeName("node"), self._send_report),
            clock=self.clock,
            pool_connector=self.pool_connector,
            block_memory=self.block_memory,
            emit=self.events.append,
        )
        self.arena = self.block_memory[: num_blocks * PACED_LAYOUT.block_bytes]
        self.role = make(context)
        self.send_item(NodeJoined(INCARNATION))

    def _send_report(self, report: NodeReport | LedgerReport, sender: Incarnation) -> None:
        self.sent_messages.append(encode_report(report, sender))

    def send_item(self, item: Any) -> None:
        """As the event loop and then the compute thread would."""
        if isinstance(item, NodeCommand):
            self.role.preview_command(item)
            self.submit_command(item)
        else:
            self._put(item)
        self.drain_inbox()

    def drain_inbox(self) -> None:
        """What the compute thread does between two steps."""
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, PublicationEnded):
                self.pool_connector.on_publication_ended(item)
            else:
                self.role.handle_item(item)

    def _put(self, item: object) -> None:
        self.inbox.append(item)

    def step(self) -> bool:
        """One turn of the compute thread; False if there was nothing to compute."""
        self.drain_inbox()
        plan = self.scheduler.schedule_step()
        if plan.outcomes:
            self.role.deliver_outcomes(plan.outcomes)
        if plan.batch is None:
            return False
        on_layer = self.role.before_step(plan.batch)
        tokens = self.engine.run(plan.batch, on_layer)
        self.role.after_step(
            plan.batch,
            self.scheduler.update_from_results(plan.batch, tokens),
            STEP_SECONDS,
        )
        return True

    def pop_messages(self, kind: str) -> list[Any]:
        """The messages of one kind sent so far, which are then forgotten."""
        found = [
            getattr(message, kind)
            for message in self.sent_messages
            if message.WhichOneof("message") == kind
        ]
        self.sent_messages[:] = [
            message for message in self.sent_messages if message.WhichOneof("message") != kind
        ]
        return found

    def count_held_blocks(self) -> dict[BlockState, int]:
        """Blocks that are neither free nor cached."""
        self.pool.check_invariants()
        idle = {BlockState.FREE, BlockState.CACHED}
        return {
            state: count
            for state, count in self.pool.ownership.count_blocks_by_state().items()
            if count and state not in idle
        }


def make_work(
    prompt: Sequence[int],
    *,
    request: str = "r",
    attempt: int = 0,
    choice: int = 0,
    max_tokens: int = 4,
    emitted: Sequence[int] = (),
    **sampled: Any,
) -> AttemptSpec:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampled)
    key = AttemptKey(RequestId(request), attempt, choice)
    generation_request = Request(key.request_id, tuple(prompt), sampling, 60.0, choice_index=choice)
    return AttemptSpec(key, generation_request, tuple(emitted), identity_digest=MODEL)


def tokens_of(message: Any) -> list[tuple[int, int]]:
    return [(token.index, token.token) for token in message.tokens]
