"""The current role of a node, and switching to another role in place.

A role and its transfer plane are built when the role is first taken, and kept until the process
ends. The fences of the arena therefore outlive every role switch: a KV writer that was suspended
long ago still cannot write to blocks that were reused since. Block pool, scheduler, engine and
cache belong to the node and do not depend on the role.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.cluster_link.messages import PeerLostNotice, SetRoleOrder
from baton.errors import BatonError
from baton.process import log
from baton.types import Role
from node_engine.core.node_commands import CoordinatorLost, NodeCommand, NodeJoined
from node_engine.core.sequences.outcomes import SequenceOutcome
from node_engine.core.step.engine import LayerCallback
from node_engine.core.step.step_batch import StepBatch
from node_engine.host.compute_thread import CallWhenIdle
from node_engine.roles.role_policy import RoleContext, RolePolicy

RoleFactory = Callable[[RoleContext], RolePolicy]


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
