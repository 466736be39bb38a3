"""What is noted of each attempt while it runs, for whoever asks afterwards where a request's time went."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.pb.common_pb2 import HandoffReport
from baton.types import Incarnation, NodeName, Role
from coordinator.core.placement import Choice, Demand, NodeView

MAX_CONSIDERED = 16  # nodes of each role; those chosen are always among them
SERVED, REFUSED = "served", "refused"


@dataclass(frozen=True, slots=True)
class Considered:
    """One node as placement saw it: attempts placed there, their uncomputed tokens, room in blocks."""

    node: NodeName
    role: Role
    attempts: int
    uncomputed_tokens: int
    room: int
    able: bool
    chosen: bool


@dataclass(slots=True)
class Notes:
    """Of one attempt. Moments on the brain's clock; None has not happened. `ended` is "" while it runs, SERVED, REFUSED
    or an error's code; `needed` and `free` are a refusal's, in blocks."""

    prefill_node: NodeName
    decode_node: NodeName
    placed: float
    context_tokens: int
    considered: tuple[Considered, ...]
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    over: float | None = None
    ended: str = ""
    reason: str = ""
    needed: int = 0
    free: int = 0
    handoff: HandoffReport | None = None

    def mark_committed(self, now: float) -> None:
        if self.committed is None:
            self.committed = now

    def end(self, now: float, ended: str, reason: str = "") -> None:
        """The first end counts."""
        if self.over is None:
            self.over, self.ended, self.reason = now, ended, reason


NameOf = Callable[[Incarnation | None], NodeName]


def begin(demand: Demand, choice: Choice, views: Iterable[NodeView], name: NameOf, now: float) -> Notes:
    """Of an attempt that is placed at this moment."""
    considered = _consider(demand, choice, views, name)
    return Notes(name(choice.prefill), name(choice.decode), now, demand.tokens, considered)


def _consider(demand: Demand, choice: Choice, views: Iterable[NodeView], name: NameOf) -> tuple[Considered, ...]:
    """What was known of the nodes that the demand could have gone to, at the moment when it was placed."""
    found = [
        Considered(
            node=name(view.incarnation),
            role=view.role,
            attempts=view.attempts,
            uncomputed_tokens=view.uncomputed_tokens,
            room=view.room,
            able=view.takes_prefill(demand) if view.role is Role.PREFILL else view.takes_decode(demand),
            chosen=view.incarnation in (choice.prefill, choice.decode),
        )
        for view in views
        if (demand.prefill if view.role is Role.PREFILL else demand.decode)
    ]
    return tuple(one for role in (Role.PREFILL, Role.DECODE) for one in _some(found, role))


def _some(found: Sequence[Considered], role: Role) -> list[Considered]:
    """The chosen one first, then others, at most `MAX_CONSIDERED`."""
    of_role = [one for one in found if one.role is role]
    return sorted(of_role, key=lambda one: not one.chosen)[:MAX_CONSIDERED]
