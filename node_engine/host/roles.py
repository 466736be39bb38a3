"""The role that a node has at this moment, and how it takes another one in place.

A role is made when it is first taken and kept for as long as the process lives, its transfer plane with it. So the
fences of the arena outlive every change of role: a writer that was frozen long ago is still kept from blocks that were
given to others since. Pool, scheduler, engine and cache are the node's own and know no role.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton import log
from baton.errors import BatonError
from baton.types import Role
from node_engine.core.messages import Command, CoordinatorLost, Joined, PeerGone, SetRole
from node_engine.core.outcome import Outcome
from node_engine.core.step import OnLayer, StepBatch
from node_engine.host.compute import WhenIdle
from node_engine.role import NodeParts, RolePolicy

MakeRole = Callable[[NodeParts], RolePolicy]


@dataclass(frozen=True, slots=True)
class FromRole:
    """An event that a role emitted to itself: another one may be in charge by the time it is handled."""

    role: Role
    event: object


class RoleSwitch:
    """A RolePolicy that passes everything on to the role in charge. What tells of the coordinator or of peers concerns
    every role that was ever taken here: its plane has tickets and peers to forget."""

    def __init__(
        self, parts: NodeParts, makers: Mapping[Role, MakeRole], role: Role, changed: Callable[[], None]
    ) -> None:
        """`changed` is called on the compute thread when the node is to join anew, because it has another role or
        cannot have it."""
        self._parts = parts
        self._makers = makers
        self._changed = changed
        self._made: dict[Role, RolePolicy] = {}
        self._wanted: Role | None = None
        self.role = role
        self._active = self._made_for(role)

    @property
    def transfer_endpoint(self) -> str:
        return self._active.transfer_endpoint

    @property
    def holding(self) -> int:
        return sum(role.holding for role in self._all())

    def counters(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for role in self._all():
            total.update(role.counters())
        return dict(total)

    def close(self) -> None:
        for role in self._all():
            role.close()

    def preview(self, command: Command) -> None:
        for role in self._concerned(command):
            role.preview(command)

    def handle(self, item: Command | object) -> None:
        match item:
            case SetRole(role):
                self._wanted = role
                self._parts.emit(WhenIdle(self._switch))
                return
            case FromRole(source, event):
                self._made[source].handle(event)
                return
            case Joined() | CoordinatorLost():
                self._wanted = None
        for concerned in self._concerned(item):
            concerned.handle(item)

    def before_step(self, batch: StepBatch) -> OnLayer | None:
        return self._active.before_step(batch)

    def after_step(self, batch: StepBatch, outcomes: Iterable[Outcome], seconds: float) -> None:
        self._active.after_step(batch, outcomes, seconds)

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        self._active.deliver(outcomes)

    def step_failed(self, batch: StepBatch, error: Exception) -> None:
        self._active.step_failed(batch, error)

    def _switch(self) -> None:
        """Nothing is held here. A no-op if the order is void by now."""
        if self._wanted is None:
            return
        role, self._wanted = self._wanted, None
        try:
            self._active = self._made_for(role)
        except BatonError as error:
            log.get("node").error("role not taken", role=role.value, reason=error.message)
        else:
            self.role = role
            log.get("node").info("role taken", role=role.value)
        self._changed()

    def _made_for(self, role: Role) -> RolePolicy:
        """Raises BatonError when its plane cannot be had."""
        if role not in self._made:
            emit = self._parts.emit
            own = replace(self._parts, emit=lambda event: emit(FromRole(role, event)))
            self._made[role] = self._makers[role](own)
        return self._made[role]

    def _all(self) -> tuple[RolePolicy, ...]:
        return tuple(self._made.values())

    def _concerned(self, item: Command | object) -> tuple[RolePolicy, ...]:
        match item:
            case SetRole():
                return ()
            case Joined() | CoordinatorLost() | PeerGone():
                return self._all()
            case _:
                return (self._active,)
