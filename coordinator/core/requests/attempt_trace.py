"""What is noted of each attempt while it runs, for whoever asks afterwards where a request's time
went."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from baton.pb.common_pb2 import HandoffReport
from baton.types import Incarnation, NodeName, Role
from coordinator.core.placement.decision import (
    LatencyPrediction,
    PlacementDecision,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.placement.interface import NodeView, required_roles
from coordinator.core.placement.prefix_aware import is_ramping_up

MAX_CONSIDERED = 16  # nodes of each role; those chosen are always among them
SERVED, REFUSED = "served", "refused"
FAILED_BEFORE, RAMPING_UP, BLOCKED_PAIR = "failed before", "newcomer", "kept apart"


class ConsideredNode(NamedTuple):
    """One node as placement saw it: attempts placed there, their uncomputed tokens, room in blocks,
    tokens of the context that its cache seems to have; `predicted_seconds` that its policy
    predicted, None if it predicts nothing; `objection`: what spoke against it, if something did:
    FAILED, NEWCOMER or APART."""

    node: NodeName
    role: Role
    attempts: int
    uncomputed_tokens: int
    free_blocks: int
    is_eligible: bool
    is_chosen: bool
    cached_tokens: int
    predicted_seconds: float | None
    objection: str


@dataclass(slots=True)
class AttemptTrace:
    """Of one attempt. Moments on the brain's clock; None has not happened. `outcome` is "" while it
    runs, SERVED, REFUSED or an error's code; `needed_blocks` and `free_blocks` are a refusal's, in
    blocks; `prefill_site`, `placement_reason` and `rejected_prediction`: see `PlacementDecision`.
    `held_back_seconds`: seconds by the retry budget, before it; `is_breaker_probe`: of its two
    nodes' breaker."""

    prefill_node: NodeName
    decode_node: NodeName
    placed: float
    context_tokens: int
    considered: tuple[ConsideredNode, ...]
    prediction: LatencyPrediction
    prefill_site: PrefillSite
    placement_reason: PlacementReason
    rejected_prediction: LatencyPrediction | None
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    over: float | None = None
    outcome: str = ""
    reason: str = ""
    held_back_seconds: float = 0.0
    is_breaker_probe: bool = False
    needed_blocks: int = 0
    free_blocks: int = 0
    handoff_report: HandoffReport | None = None
    is_handoff_skipped: bool = False

    def mark_handoff_skipped(self) -> None:
        """Decode turned out to hold the context: it computes the last token itself, and prefill has
        no part in it."""
        self.is_handoff_skipped = True
        self.prefill_site, self.placement_reason, self.rejected_prediction, self.prefill_ended = (
            PrefillSite.LOCAL,
            PlacementReason.PREFIX_CACHED,
            None,
            None,
        )

    def mark_committed(self, now: float) -> None:
        if self.committed is None:
            self.committed = now

    def mark_ended(self, now: float, ended: str, reason: str = "") -> None:
        """The first end counts."""
        if self.over is None:
            self.over, self.outcome, self.reason = now, ended, reason


NodeNameLookup = Callable[[Incarnation | None], NodeName]


def start_trace(decision: PlacementDecision, name: NodeNameLookup, now: float) -> AttemptTrace:
    """Of an attempt that is placed at this moment."""
    choice = decision.choice
    roles = required_roles(decision.demand) if decision.rejected_prediction is None else tuple(Role)
    considered = tuple(one for role in roles for one in _rank_candidates(decision, role))
    return AttemptTrace(
        name(choice.prefill),
        name(choice.decode),
        now,
        decision.demand.context_tokens,
        considered,
        decision.prediction,
        decision.prefill_site,
        decision.reason,
        decision.rejected_prediction,
    )


def _rank_candidates(decision: PlacementDecision, role: Role) -> Iterator[ConsideredNode]:
    """What was known of nodes that the demand could have gone to, when it was placed: the one
    chosen first, then those that were predicted to be fastest."""
    demand, scores = decision.demand, decision.choice.predicted_seconds
    chosen = {decision.choice.prefill, decision.choice.decode}
    ranked = [
        (view.incarnation not in chosen, scores.get(view.incarnation, inf), number)
        for number, view in enumerate(decision.views)
        if view.role is role
    ]
    ranked.sort()
    for _, _, number in ranked[:MAX_CONSIDERED]:
        view = decision.views[number]
        yield ConsideredNode(
            node=view.name,
            role=view.role,
            attempts=view.attempts,
            uncomputed_tokens=view.uncomputed_tokens,
            free_blocks=view.free_blocks,
            is_eligible=view.can_accept(demand),
            is_chosen=view.incarnation in chosen,
            cached_tokens=demand.cached_tokens_on(view.incarnation),
            predicted_seconds=scores.get(view.incarnation),
            objection=_objection_to(decision, view),
        )


def _objection_to(decision: PlacementDecision, view: NodeView) -> str:
    choice, mine = decision.choice, view.incarnation
    pair = (mine, choice.decode) if view.role is Role.PREFILL else (choice.prefill, mine)
    if pair in decision.blocked_pairs:
        return BLOCKED_PAIR
    if mine in decision.demand.avoided_nodes:
        return FAILED_BEFORE
    return (
        RAMPING_UP if mine in choice.predicted_seconds and is_ramping_up(view, decision.now) else ""
    )
