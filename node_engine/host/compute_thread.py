"""The compute thread of a node, its inbox, and the role that it runs.

Only the compute thread touches block pool, sequences and engine. Any thread puts items into its
inbox, and it alone drains them.

The coordinator may switch the role of a node in place. A role and its transfer plane are built when
the role is first taken, and kept until the process ends. The fences of the arena therefore outlive
every role switch: a KV writer that was suspended long ago still cannot write to blocks that were
reused since. Block pool, scheduler, engine and cache belong to the node and do not depend on the
role.
"""

import math
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from baton.cluster_link.messages import (
    CacheSnapshotRequest,
    LedgerQuery,
    PeerLostNotice,
    SetRoleOrder,
)
from baton.errors import BatonError
from baton.process import log
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS, failpoint
from baton.types import Role
from node_engine.core.metrics.decode_step_totals import DecodeStepTotals
from node_engine.core.metrics.device_time import DeviceTime
from node_engine.core.metrics.utilization import WorkMeter, make_step_costs
from node_engine.core.node_commands import CoordinatorLost, NodeCommand, NodeJoined
from node_engine.core.sequences.outcomes import SequenceOutcome, count_accepted_drafts
from node_engine.core.step.engine import DeviceLost, LayerCallback
from node_engine.core.step.step_batch import StepBatch
from node_engine.roles.role_policy import RoleContext, RolePolicy
from node_engine.shared_pool.pool_connector import PublicationEnded

T = TypeVar("T")
# Items of the inbox are handled between two steps for as long as the last step took, within these
# bounds. Many requests that arrive together do not stop those that decode.
_MIN_INBOX_SECONDS, _MAX_INBOX_SECONDS = 0.002, 0.05


def exit_process(error: BaseException) -> None:
    """End the process at once: what handles a failure of the compute thread in a node process."""
    log.flush_log()
    os._exit(1)


RoleFactory = Callable[[RoleContext], RolePolicy]


class ComputeInbox(Generic[T]):
    """An unbounded thread-safe queue whose reader takes all items at once."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        self._queue.put(item)

    def drain(self, *, wait: bool) -> list[T]:
        """All items that have arrived, in order. With `wait`, blocks until there is one."""
        items: list[T] = []
        if wait:
            items.append(self._queue.get())
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items


@dataclass(frozen=True, slots=True)
class StopCompute:
    """Ends the compute thread: the last item of an inbox."""


@dataclass(frozen=True, slots=True)
class CacheMemoryExhausted:
    """There is no memory for the blocks that have none yet: the cache stays smaller."""


@dataclass(frozen=True, slots=True)
class AwaitedMaskComputed:
    """A sequence that stayed out of steps, because its mask took long, may join them again."""


@dataclass(frozen=True, slots=True)
class CallWhenIdle:
    """Call `callback` once, on the compute thread, as soon as the node holds no attempt."""

    callback: Callable[[], None]


class ComputeThread:
    """Runs the loop of a node: handle commands, schedule, compute, deliver.

    A step that raises fails its own attempts. Any other error is a bug, and the thread ends with
    `on_failed`, by which a node process exits at once, so that nothing wrong is served.
    """

    def __init__(
        self,
        context: RoleContext,
        inbox: ComputeInbox[NodeCommand | object],
        clock: Clock,
        submit: Callable[[NodeCommand], None],
        on_failed: Callable[[BaseException], None] = exit_process,
    ) -> None:
        """`submit` puts a command into `inbox`, once all that it needs is there.

        `on_failed` is called on the thread, as the last thing that it does.
        """
        self._on_failed = on_failed
        self._context = context
        self._inbox = inbox
        self._clock = clock
        self._submit = submit
        self._role: RolePolicy | None = None
        # Snapshots for other threads, replaced in every turn of the loop.
        self.scheduler_load = context.scheduler.capacity.get_load()
        self.decode_step_totals = DecodeStepTotals()
        self.device_seconds: dict[str, float] = {}
        self.work_meter = WorkMeter(make_step_costs(context.engine))
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._log = log.get_logger("compute")
        self._device_time = DeviceTime()
        self._idle_callbacks: list[Callable[[], None]] = []
        self._pending_items: deque[NodeCommand | object] = deque()  # taken from the inbox
        self._last_step_seconds = 0.0
        self._last_progress_at: float | None = None  # clock time; None while there is no work

    def start(self, role: RolePolicy) -> None:
        self._role = role
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current step; returns when it has ended."""
        self._inbox.put(StopCompute())
        self._thread.join()

    def submit_command(self, command: NodeCommand) -> None:
        """Accept a command of the coordinator, on the event loop.

        The role may act on it at once. The thread itself finds it in its inbox.
        """
        assert self._role is not None
        self._role.preview_command(command)
        self._submit(command)

    @property
    def progress_age_seconds(self) -> float:
        """Seconds since the last progress of the thread; 0 while it has no work. Any thread."""
        since = self._last_progress_at
        return 0.0 if since is None else self._clock() - since

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            fields = log.get_error_fields(error)
            if isinstance(error, DeviceLost):
                fields["reason"] = error.reason
            self._log.error("compute thread failed", **fields)
            self._on_failed(error)

    def _loop(self) -> None:
        assert self._role is not None
        idle = True
        while self._handle_inbox(wait=idle):
            step = self._context.scheduler.schedule_step()
            if step.outcomes:
                self._role.deliver_outcomes(step.outcomes)
            if step.batch is not None:
                self._run_step(step.batch)
            else:
                self.work_meter.pause()
            idle = step.batch is None and not step.outcomes
            self._report_cache_changes(is_idle=idle)

    def _report_cache_changes(self, *, is_idle: bool) -> None:
        """Flush cache events periodically, and always before going idle."""
        journal, now = self._context.block_pool.cache_journal, self._clock()
        if is_idle or journal.is_flush_due(now):
            self._context.reporter.report_cache_changes(journal.pop_events(now))

    def _report_cache_snapshot(self) -> None:
        pool = self._context.block_pool
        hashes = pool.prefix_index.iter_full_block_hashes(pool.block_size)
        self._context.reporter.report_cache_changes(
            pool.cache_journal.build_snapshot(hashes, self._clock())
        )

    def _handle_inbox(self, *, wait: bool) -> bool:
        """Handle the items that have arrived; returns False if the thread must end.

        Without `wait` there is a step to run: items that take too long are left for the next call.
        """
        assert self._role is not None
        self.scheduler_load = self._context.scheduler.capacity.get_load()
        if wait:
            self._last_progress_at = None
            if self._idle_callbacks and self._role.num_held_attempts == 0:
                callbacks, self._idle_callbacks = self._idle_callbacks, []
                for callback in callbacks:
                    callback()
        self._pending_items.extend(self._inbox.drain(wait=wait and not self._pending_items))
        self._last_progress_at = started = self._clock()
        budget = max(_MIN_INBOX_SECONDS, min(self._last_step_seconds, _MAX_INBOX_SECONDS))
        budget = math.inf if wait else budget
        while self._pending_items and self._clock() - started < budget:
            match item := self._pending_items.popleft():
                case StopCompute():
                    return False
                case CallWhenIdle(callback):
                    self._idle_callbacks.append(callback)
                case AwaitedMaskComputed():
                    pass  # the next step has the sequence
                case CacheMemoryExhausted():
                    self._context.block_pool.remove_unbacked_blocks()
                case LedgerQuery(query):
                    self._context.reporter.report_ledger(
                        query, self._context.block_pool.take_ledger()
                    )
                case PublicationEnded():
                    self._context.pool_connector.on_publication_ended(item)
                case CacheSnapshotRequest():
                    self._report_cache_snapshot()
                case NodeJoined():
                    self._role.handle_item(item)
                    self._context.block_pool.cache_journal.restart_numbering()
                    self._report_cache_snapshot()
                case _:
                    self._role.handle_item(item)
        return True

    def _run_step(self, batch: StepBatch) -> None:
        assert self._role is not None
        started = self._clock()
        drafting_seconds = self._context.scheduler.speculator.drafting_seconds
        try:
            with failpoint("decode.step") if FAILPOINTS.armed else nullcontext():
                results = self._context.engine.run(batch, self._role.before_step(batch))
        except (BatonError, RuntimeError) as error:
            self._charge_device_time(batch, self._clock() - started + drafting_seconds)
            self.work_meter.pause()
            self._log.error("engine step failed", **log.get_error_fields(error))
            self._role.on_step_failed(batch, error)
            return
        ended = self._clock()
        self._last_step_seconds = seconds = ended - started
        computed = batch.without_deferred(results)
        self.work_meter.add_step(computed, started, ended)
        self._charge_device_time(computed, seconds + drafting_seconds)
        tokens = computed.num_tokens
        if tokens - computed.num_draft_tokens > len(computed.slices):
            self._context.pool_connector.copy_cost_model.observe_prefill(tokens, seconds)
        self._context.scheduler.prefill_budget.observe_step(computed, seconds)
        self._context.scheduler.speculator.observe_step(computed, seconds)
        outcomes = self._context.scheduler.update_from_results(batch, results)
        self.decode_step_totals = self.decode_step_totals.with_step(
            computed, seconds + drafting_seconds, count_accepted_drafts(outcomes)
        )
        self._role.after_step(computed, outcomes, seconds)

    def _charge_device_time(self, batch: StepBatch, seconds: float) -> None:
        self._device_time.charge_step(batch, self._context.scheduler.sequences_in_flight, seconds)
        self.device_seconds = self._device_time.counters()


@dataclass(frozen=True, slots=True)
class RoleEvent:
    """An event that a role has emitted; it is handled by that role, even if another is active."""

    role: Role
    event: object


class SwitchableRole:
    """A RolePolicy that delegates to the active role.

    Commands about the coordinator or about peers go to every role that was ever taken here, because
    its plane may have tickets and peers to forget.
    """

    def __init__(
        self,
        context: RoleContext,
        role_factories: Mapping[Role, RoleFactory],
        role: Role,
        on_changed: Callable[[], None],
    ) -> None:
        """`on_changed` is called on the compute thread after each role switch, successful or not.

        The node must then rejoin the cluster.
        """
        self._context = context
        self._role_factories = role_factories
        self._on_changed = on_changed
        self._roles: dict[Role, RolePolicy] = {}
        self._target_role: Role | None = None
        self.role = role
        self._active_role = self._get_or_make_role(role)

    @property
    def transfer_endpoint(self) -> str:
        return self._active_role.transfer_endpoint

    @property
    def num_held_attempts(self) -> int:
        return sum(role.num_held_attempts for role in self._list_roles())

    def counters(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for role in self._list_roles():
            total.update(role.counters())
        return dict(total)

    def close(self) -> None:
        for role in self._list_roles():
            role.close()

    def preview_command(self, command: NodeCommand) -> None:
        for role in self._list_concerned_roles(command):
            role.preview_command(command)

    def handle_item(self, item: NodeCommand | object) -> None:
        match item:
            case SetRoleOrder(role):
                self._target_role = role
                self._context.emit(CallWhenIdle(self._switch_role))
                return
            case RoleEvent(source, event):
                self._roles[source].handle_item(event)
                return
            case NodeJoined() | CoordinatorLost():
                self._target_role = None
        for concerned in self._list_concerned_roles(item):
            concerned.handle_item(item)

    def before_step(self, batch: StepBatch) -> LayerCallback | None:
        return self._active_role.before_step(batch)

    def after_step(
        self, batch: StepBatch, outcomes: Iterable[SequenceOutcome], seconds: float
    ) -> None:
        self._active_role.after_step(batch, outcomes, seconds)

    def deliver_outcomes(self, outcomes: Iterable[SequenceOutcome]) -> None:
        self._active_role.deliver_outcomes(outcomes)

    def on_step_failed(self, batch: StepBatch, error: Exception) -> None:
        self._active_role.on_step_failed(batch, error)

    def _switch_role(self) -> None:
        """Switch to the target role, while no attempt is held. Does nothing if it was cancelled."""
        if self._target_role is None:
            return
        role, self._target_role = self._target_role, None
        try:
            self._active_role = self._get_or_make_role(role)
        except BatonError as error:
            log.get_logger("node").error(
                "role change failed", role=role.value, reason=error.message
            )
        else:
            self.role = role
            log.get_logger("node").info("role changed", role=role.value)
        self._on_changed()

    def _get_or_make_role(self, role: Role) -> RolePolicy:
        """Raises BatonError if the role's transfer plane cannot be built."""
        if role not in self._roles:
            emit = self._context.emit
            own = replace(self._context, emit=lambda event: emit(RoleEvent(role, event)))
            self._roles[role] = self._role_factories[role](own)
        return self._roles[role]

    def _list_roles(self) -> tuple[RolePolicy, ...]:
        return tuple(self._roles.values())

    def _list_concerned_roles(self, item: NodeCommand | object) -> tuple[RolePolicy, ...]:
        match item:
            case SetRoleOrder():
                return ()
            case NodeJoined() | CoordinatorLost() | PeerLostNotice():
                return self._list_roles()
            case _:
                return (self._active_role,)
