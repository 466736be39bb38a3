"""The protocol of a role: how a node handles commands, transfer events and the outcomes of steps.

The process that hosts a role (node_engine/host) does not depend on any; prefill_node and
decode_node implement one each, on the base of base_role.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from baton.config.node_config import NodeConfig
from baton.errors import GrammarFailed
from baton.process.clock import Clock
from baton.shared_memory.segment import Segment
from baton.types import AttemptKey, AttemptSpec, NodeName
from node_engine.core.blocks.block_pool import BlockPool
from node_engine.core.node_commands import NodeCommand
from node_engine.core.scheduling.scheduler import Scheduler
from node_engine.core.sequences.outcomes import SequenceOutcome
from node_engine.core.sequences.token_constraint import TokenConstraint
from node_engine.core.step.engine import Engine, LayerCallback
from node_engine.core.step.step_batch import StepBatch
from node_engine.roles.coordinator_reporter import CoordinatorReporter
from node_engine.shared_pool.pool_connector import PoolConnector


class ConstraintSource(Protocol):
    """The grammars of outputs, which were prepared when the orders arrived."""

    def take_constraint(self, work: AttemptSpec) -> TokenConstraint | None:
        """Return the grammar's state for a new attempt, once; None if its output has no grammar.

        Raises BatonError if it could not be prepared.
        """
        ...

    def drop_constraint(self, key: AttemptKey) -> None:
        """Forget a constraint that was not taken."""
        ...


class NoConstraints:
    """Refuses attempts whose outputs have a grammar; a ConstraintSource."""

    def take_constraint(self, work: AttemptSpec) -> None:
        if work.request.sampling.structured_output is not None:
            raise GrammarFailed("structured output needs a tokenizer.json, and this node has none")

    def drop_constraint(self, key: AttemptKey) -> None:
        """There are none."""


@dataclass(frozen=True, slots=True)
class RoleContext:
    """What the node process gives a role."""

    config: NodeConfig
    name: NodeName
    host_id: str
    engine: Engine
    arena: Segment
    block_pool: BlockPool  # compute thread only, as are scheduler, engine and pool connector
    scheduler: Scheduler
    reporter: CoordinatorReporter
    clock: Clock
    pool_connector: PoolConnector
    block_memory: memoryview  # all blocks that a block table may contain, the arena's first
    emit: Callable[[object], None]  # puts an event of the role on the inbox; thread-safe
    constraints: ConstraintSource = field(default_factory=NoConstraints)


class RolePolicy(Protocol):
    """A role of a node. Compute thread only, except `preview_command`, `counters` and `close`."""

    @property
    def transfer_endpoint(self) -> str:
        """Where peers reach this node's transfer plane; "" if it accepts no connections."""
        ...

    @property
    def num_held_attempts(self) -> int:
        """Number of attempts with resources here; at 0 the node may leave or switch its role."""
        ...

    def preview_command(self, command: NodeCommand) -> None:
        """Called on the event loop with every command, in order and before `handle_item`.

        For actions that must not wait until the step in progress has ended.
        """
        ...

    def handle_item(self, item: NodeCommand | object) -> None:
        """Handle a command of the coordinator or an event that the role has emitted."""
        ...

    def before_step(self, batch: StepBatch) -> LayerCallback | None:
        """Prepare for the step. Returns a callback for completed layers, or None.

        The callback must not block. Without one, the engine need not wait for the device after each
        layer.
        """
        ...

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        """The step took `seconds` and had these outcomes."""
        ...

    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        """Handle outcomes of the scheduler, also those without a step, such as preemptions."""
        ...

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        """The forward pass raised `error`: end every attempt in the batch."""
        ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None: ...
