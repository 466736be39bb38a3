"""What is noted of each attempt while it runs, for whoever asks afterwards where a request's time went."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from baton.pb.common_pb2 import HandoffReport
from baton.types import Incarnation, NodeName, Role
from coordinator.core.placement import NodeView, needed
from coordinator.core.prediction import Decision, Prediction, Way, Why
from coordinator.core.prefix_aware import ramps_up

MAX_CONSIDERED = 16  # nodes of each role; those chosen are always among them
SERVED, REFUSED = "served", "refused"
FAILED, NEWCOMER, APART = "failed before", "newcomer", "kept apart"


class Considered(NamedTuple):
    """One node as placement saw it: attempts placed there, their uncomputed tokens, room in blocks, tokens of the
    context that its cache seems to have; `seconds` that its policy predicted, None if it predicts nothing; `because`:
    what spoke against it, if something did: FAILED, NEWCOMER or APART."""

    node: NodeName
    role: Role
    attempts: int
    uncomputed_tokens: int
    room: int
    able: bool
    chosen: bool
    held_tokens: int
    seconds: float | None
    because: str


@dataclass(slots=True)
class Notes:
    """Of one attempt. Moments on the brain's clock; None has not happened. `ended` is "" while it runs, SERVED, REFUSED
    or an error's code; `needed` and `free` are a refusal's, in blocks; `way`, `why` and `other`: see `Decision`.
    `held_back`: seconds by the retry budget, before it; `probe`: of its two nodes' breaker."""

    prefill_node: NodeName
    decode_node: NodeName
    placed: float
    context_tokens: int
    considered: tuple[Considered, ...]
    prediction: Prediction
    way: Way
    why: Why
    other: Prediction | None
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    over: float | None = None
    ended: str = ""
    reason: str = ""
    held_back: float = 0.0
    probe: bool = False
    needed: int = 0
    free: int = 0
    handoff: HandoffReport | None = None
    handoff_spared: bool = False

    def spare_handoff(self) -> None:
        """Decode turned out to hold the context: it computes the last token itself, and prefill has no part in it."""
        self.handoff_spared = True
        self.way, self.why, self.other, self.prefill_ended = Way.LOCAL, Why.HELD, None, None

    def mark_committed(self, now: float) -> None:
        if self.committed is None:
            self.committed = now

    def end(self, now: float, ended: str, reason: str = "") -> None:
        """The first end counts."""
        if self.over is None:
            self.over, self.ended, self.reason = now, ended, reason


NameOf = Callable[[Incarnation | None], NodeName]


def begin(decision: Decision, name: NameOf, now: float) -> Notes:
    """Of an attempt that is placed at this moment."""
    choice = decision.choice
    roles = needed(decision.demand) if decision.other is None else tuple(Role)
    considered = tuple(one for role in roles for one in _consider(decision, role))
    return Notes(
        name(choice.prefill),
        name(choice.decode),
        now,
        decision.demand.tokens,
        considered,
        decision.prediction,
        decision.way,
        decision.why,
        decision.other,
    )


def _consider(decision: Decision, role: Role) -> Iterator[Considered]:
    """What was known of nodes that the demand could have gone to, when it was placed: the one chosen first, then those
    that were predicted to be fastest."""
    demand, scores = decision.demand, decision.choice.scores
    chosen = {decision.choice.prefill, decision.choice.decode}
    ranked = [
        (view.incarnation not in chosen, scores.get(view.incarnation, inf), number)
        for number, view in enumerate(decision.views)
        if view.role is role
    ]
    ranked.sort()
    for _, _, number in ranked[:MAX_CONSIDERED]:
        view = decision.views[number]
        yield Considered(
            node=view.name,
            role=view.role,
            attempts=view.attempts,
            uncomputed_tokens=view.uncomputed_tokens,
            room=view.room,
            able=view.takes(demand),
            chosen=view.incarnation in chosen,
            held_tokens=demand.held_by(view.incarnation),
            seconds=scores.get(view.incarnation),
            because=_against(decision, view),
        )


def _against(decision: Decision, view: NodeView) -> str:
    choice, mine = decision.choice, view.incarnation
    pair = (mine, choice.decode) if view.role is Role.PREFILL else (choice.prefill, mine)
    if pair in decision.apart:
        return APART
    if mine in decision.demand.avoid:
        return FAILED
    return NEWCOMER if mine in choice.scores and ramps_up(view, decision.now) else ""
