"""What is recorded of each attempt while it runs, for `baton explain`."""

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

MAX_CONSIDERED = 16  # candidates recorded for each role; the chosen ones are always among them
SERVED, REFUSED = "served", "refused"
FAILED_BEFORE, RAMPING_UP, BLOCKED_PAIR = "failed before", "newcomer", "kept apart"


class ConsideredNode(NamedTuple):
    """One candidate as placement saw it."""

    node: NodeName
    role: Role
    attempts: int  # attempts placed there
    uncomputed_tokens: int  # prompt tokens placed there and not computed
    free_blocks: int
    is_eligible: bool
    is_chosen: bool
    cached_tokens: int  # context tokens that its cache seems to have
    predicted_seconds: float | None  # None if the policy predicts nothing
    objection: str  # FAILED_BEFORE, RAMPING_UP, BLOCKED_PAIR or ""


@dataclass(slots=True)
class AttemptTrace:
    """The history of one attempt; times are on the brain's clock, None has not happened."""

    prefill_node: NodeName
    decode_node: NodeName
    placed: float
    context_tokens: int
    considered: tuple[ConsideredNode, ...]
    prediction: LatencyPrediction
    prefill_site: PrefillSite  # see `PlacementDecision`, also for the next two
    placement_reason: PlacementReason
    rejected_prediction: LatencyPrediction | None
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    over: float | None = None
    outcome: str = ""  # "" while it runs; then SERVED, REFUSED or an error code
    reason: str = ""
    held_back_seconds: float = 0.0  # by the retry budget, before the attempt
    is_breaker_probe: bool = False  # the attempt tests a half-open breaker
    needed_blocks: int = 0  # of a refusal
    free_blocks: int = 0  # of a refusal
    handoff_report: HandoffReport | None = None
    is_handoff_skipped: bool = False

    def mark_handoff_skipped(self) -> None:
        """Decode already has the context: it computes the last token itself, without a hand-off."""
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
        """Record the outcome; only the first call counts."""
        if self.over is None:
            self.over, self.outcome, self.reason = now, ended, reason


NodeNameLookup = Callable[[Incarnation | None], NodeName]


def start_trace(decision: PlacementDecision, name: NodeNameLookup, now: float) -> AttemptTrace:
    """Start the trace of an attempt that is placed now."""
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
    """Yield the candidates of a role: the chosen one first, then the fastest by prediction."""
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
