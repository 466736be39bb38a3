"""A role is a policy object: what a node does with what it is told and with what its steps produce.
The process that hosts it (node_engine/host) knows no role; prefill_node and decode_node each bring
one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from baton.config.settings import Config
from baton.errors import ModelMismatch
from baton.limits import ModelBounds, check_prompt, check_sampling
from baton.process.clock import Clock
from baton.shared_memory.segment import Segment
from baton.types import AttemptSpec, NodeName
from node_engine.core.blocks.block_ledger import BlockState
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.node_commands import NodeCommand
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import SequenceOutcome
from node_engine.core.step.step_batch import Engine, LayerCallback, StepBatch
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from node_engine.shared_pool.pool_connector import PoolConnector


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What the host gives a role. Pool, scheduler and engine belong to the compute thread."""

    config: Config
    name: NodeName
    host_id: str
    engine: Engine
    arena: Segment
    block_pool: BlockPool
    scheduler: Scheduler
    reporter: CoordinatorReporter
    clock: Clock
    pool_connector: PoolConnector  # the node's use of the host's shared pool; the compute thread's
    block_memory: memoryview  # every block that a block table may name, the arena's first
    emit: Callable[
        [object], None
    ]  # puts an event of the role's own on the compute thread's inbox; thread-safe


def check_work(work: AttemptSpec, engine: Engine, *, context_only: bool = False) -> None:
    """The coordinator has checked all of it; but what indexes a node's memory, and what no client
    would notice, is checked by the node. With `context_only` another node gives the answer, and
    this one needs no room for it.

    Raises WrongModel for a request that is bound to another model, whose tokens this node must not
    continue, TooLong for one that is longer than this node serves, and InvalidRequest for what the
    model does not know."""
    mine = engine.model_identity.digest()
    if work.identity_digest != mine:
        raise ModelMismatch(
            f"{work.key} is bound to model {work.identity_digest.hex()[:16] or 'none'}, this node serves {mine.hex()[:16]}: it"
            " must be placed on a node of its own model"
        )
    bounds = ModelBounds(engine.vocab_size, engine.max_model_len + 1, 1 << 62)
    check_prompt(work.context_token_ids, bounds)
    if context_only:
        bounds = replace(bounds, max_model_len=1 << 62)
    check_sampling(work.request.sampling, len(work.request.prompt_token_ids), bounds)


def report_too_long(work: AttemptSpec, pool: BlockPool, report: CoordinatorReporter) -> None:
    """Answer that this node will never have room for a request that another one may well hold. It
    is no fault of the client, so it must not end the request."""
    counts = pool.count_blocks_by_state()
    report.report_refused(
        work.key, pool.num_blocks + 1, counts[BlockState.FREE] + counts[BlockState.CACHED]
    )


class RolePolicy(Protocol):
    """Called on the compute thread only, except `preview_command`, `counters` and `close`."""

    @property
    def transfer_endpoint(self) -> str:
        """Where peers reach this node's transfer plane; "" if nobody needs to."""
        ...

    @property
    def num_held_attempts(self) -> int:
        """Attempts that this node still holds something for: 0 means that it may leave."""
        ...

    def preview_command(self, command: NodeCommand) -> None:
        """Every command, on the event loop, in the order of the stream and before `handle_item`
        sees it: for what must not wait until the step in progress has ended."""
        ...

    def handle_item(self, item: NodeCommand | object) -> None:
        """A command of the coordinator, or an event that the role emitted to itself."""
        ...

    def before_step(self, batch: StepBatch) -> LayerCallback | None:
        """Prepare for the step. Returns what is to be called when the KV of a layer is in the arena
        for every slice, which must not block, or None if nobody waits for single layers: an engine
        then need not wait for the device after each of them."""
        ...

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        """The step took `seconds`; `outcomes` is what became of its sequences."""
        ...

    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        """What the scheduler decided without computing: who was preempted, dropped or refused."""
        ...

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        """The forward pass raised: every attempt in the batch is over."""
        ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None: ...
