"""What the prefill and the decode role do alike: begin attempts, check them, and end them.

A role differs in what an attempt does between its beginning and its end. BaseRole has the rest: the
loss of the coordinator and a new incarnation, the pool prefix that an order came with, refusals,
failed steps, and what the node reports of its transfer plane.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Protocol

from baton.cluster_link.messages import (
    CancelOrder,
    DecodeOrder,
    PrefillOrder,
)
from baton.errors import BatonError, ContextLengthExceeded, ModelMismatch, NodeFailed, StaleMessage
from baton.kv.blocks import BlockHash, root_hash
from baton.kv.pool_types import PoolHit
from baton.limits import ModelBounds, check_prompt, check_sampling
from baton.types import AttemptKey, AttemptSpec, Incarnation
from node_engine.core.blocks.block_records import BlockState
from node_engine.core.blocks.pool_prefix import PoolPrefix
from node_engine.core.node_commands import (
    CoordinatorLost,
    NodeCommand,
    NodeJoined,
    OrderWithPoolHit,
)
from node_engine.core.sequences.outcomes import SequenceOutcome
from node_engine.core.step.engine import Engine, LayerCallback
from node_engine.core.step.step_batch import StepBatch
from node_engine.roles.role_policy import RoleContext

_UNBOUNDED = 1 << 62


class TransferPlane(Protocol):
    """What the planes of both roles have in common."""

    @property
    def endpoint(self) -> str: ...

    def counters(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class BaseRole(ABC):
    """A RolePolicy whose subclass says what becomes of an attempt. Compute thread only."""

    def __init__(self, context: RoleContext, plane: TransferPlane) -> None:
        self._context = context
        self._transfer_plane = plane
        self._scheduler = context.scheduler
        self._block_pool = context.block_pool
        self._reporter = context.reporter
        self._pool_connector = context.pool_connector
        self._layout = context.engine.layout
        self._identity_digest = context.engine.model_identity.digest

    @property
    def transfer_endpoint(self) -> str:
        return self._transfer_plane.endpoint

    @property
    @abstractmethod
    def num_held_attempts(self) -> int: ...

    def counters(self) -> dict[str, float]:
        counters = self._transfer_plane.counters()
        return {f"baton_transfer_{name}_total": value for name, value in counters.items()}

    def close(self) -> None:
        self._transfer_plane.close()

    def preview_command(self, command: NodeCommand) -> None:
        """Unless a role says otherwise, commands wait until the step in progress has ended."""
        return

    def handle_item(self, item: NodeCommand | object) -> None:
        match item:
            case NodeJoined(incarnation):
                self._drop_all_attempts(StaleMessage("this node has joined anew"))
                self._reporter.incarnation = incarnation
                self._on_joined(incarnation)
            case CoordinatorLost():
                self._drop_all_attempts(self._coordinator_lost_error())
            case PrefillOrder() | DecodeOrder():
                self._begin_attempt(item, None)
            case OrderWithPoolHit(order, hit):
                self._begin_attempt(order, hit)
            case CancelOrder(key, reason):
                self._end_attempt(key, reason, report=False)
            case _:
                self._handle_event(item)

    def before_step(self, batch: StepBatch) -> LayerCallback | None:
        return None

    @abstractmethod
    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None: ...

    @abstractmethod
    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None: ...

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        if not isinstance(error, BatonError):
            error = NodeFailed(f"{type(error).__name__} in the forward pass")
        in_flight = self._scheduler.sequences_in_flight
        failed = [in_flight[slice_.sequence_id].key for slice_ in batch.slices]
        self._scheduler.abandon_step(batch)
        for key in failed:
            self._end_attempt(key, error, report=True)

    # what a role does in its own way

    @abstractmethod
    def _start_attempt(
        self, order: PrefillOrder | DecodeOrder, pool_prefix: PoolPrefix | None
    ) -> None:
        """Begin to work on a new attempt, or raise BatonError: it is then ended and reported."""

    @abstractmethod
    def _end_attempt(self, key: AttemptKey, error: BatonError, *, report: bool) -> None:
        """End an attempt and, with `report`, report the error. Does nothing for an ended one."""

    @abstractmethod
    def _is_known(self, key: AttemptKey) -> bool:
        """Whether this node works on the attempt already."""

    @abstractmethod
    def _list_attempts(self) -> Collection[AttemptKey]:
        """The attempts that have resources here. A key may occur twice."""

    @abstractmethod
    def _coordinator_lost_error(self) -> BatonError:
        """Why attempts end when the coordinator was away for too long."""

    @abstractmethod
    def _handle_event(self, item: object) -> None:
        """Handle an event of the role's plane or one of the role's own commands."""

    @abstractmethod
    def _on_joined(self, incarnation: Incarnation) -> None:
        """The node has a new incarnation, and no attempt."""

    # what subclasses use

    def _check_work(self, work: AttemptSpec, *, context_only: bool = False) -> None:
        engine, digest = self._context.engine, self._identity_digest
        check_work(work, engine, digest, context_only=context_only)

    def _compute_root_hash(self, work: AttemptSpec) -> BlockHash:
        digest = self._context.engine.model_digest
        return root_hash(digest, self._layout, work.request.cache_salt)

    # helpers

    def _begin_attempt(self, order: PrefillOrder | DecodeOrder, hit: PoolHit | None) -> None:
        work = order.work
        pool_prefix = None if hit is None else self._pool_connector.build_pool_prefix(hit)
        if not self._is_known(work.key):  # else the order is a duplicate
            try:
                self._start_attempt(order, pool_prefix)
            except ContextLengthExceeded as error:
                self._refuse_too_long(work)
                self._end_attempt(work.key, error, report=False)
            except BatonError as error:
                self._end_attempt(work.key, error, report=True)
        self._context.constraints.drop_constraint(work.key)
        if pool_prefix is not None:
            pool_prefix.release()

    def _refuse_too_long(self, work: AttemptSpec) -> None:
        """Refuse a request that can never fit on this node: it needs more than all blocks.

        Another node may have room for it, so the refusal must not end the request.
        """
        counts = self._block_pool.ownership.count_blocks_by_state()
        free = counts[BlockState.FREE] + counts[BlockState.CACHED]
        self._reporter.report_refused(work.key, self._block_pool.num_blocks + 1, free)

    def _drop_all_attempts(self, reason: BatonError) -> None:
        """The coordinator no longer knows this work: end all attempts, keep the prefix cache."""
        for key in self._list_attempts():
            self._end_attempt(key, reason, report=False)


def check_work(
    work: AttemptSpec, engine: Engine, identity_digest: bytes, *, context_only: bool
) -> None:
    """Check an attempt before work on it begins; with `context_only` another node decodes it.

    The coordinator has checked the request, but the node checks again what indexes its memory and
    what no client would notice. Raises ModelMismatch for a request that is bound to another model,
    ContextLengthExceeded for one that is longer than this node serves, and InvalidRequest for
    tokens or parameters that the model does not support.
    """
    if work.identity_digest != identity_digest:
        raise ModelMismatch(
            f"{work.key} is bound to model {work.identity_digest.hex()[:16] or 'none'},"
            f" this node serves {identity_digest.hex()[:16]}:"
            " it must be placed on a node of its own model"
        )
    bounds = ModelBounds(engine.vocab_size, engine.max_model_len + 1, _UNBOUNDED)
    check_prompt(work.context_token_ids, bounds)
    if context_only:
        bounds = replace(bounds, max_model_len=_UNBOUNDED)
    check_sampling(work.request.sampling, len(work.request.prompt_token_ids), bounds)
