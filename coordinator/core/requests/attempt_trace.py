"""Records each attempt while it runs, for `baton explain`, and where a request's time went.

The time to the first token is cut at four moments, each no earlier than the one before and no later
than the first token, so that the stages are a partition of it whatever arrives, in whatever order,
or never:

    moment   arrival     placed        reserved      prefill_ended      committed          token
    stage          queue       reserve        prefill           transfer      first_token

`placed` is the last placement before the first token. Prefill computes while decode reserves, and
layers travel while prefill computes: a stage is the part that was exposed. `committed` is when the
coordinator first hears of the commit, from either node. Where decode computes the prompt itself
there is no transfer, and `prefill` lasts until the token.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from baton.cluster_link.report_types import HandoffReport
from baton.types import AttemptKey, Incarnation, NodeName, RequestId, Role
from coordinator.core.common.timeline import Timeline
from coordinator.core.placement.interface import (
    LatencyPrediction,
    PlacementDecision,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.placement.node_loads import NodeView
from coordinator.core.placement.policies import is_ramping_up

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
    needed_blocks: int = 0  # after a refusal, the KV blocks that decode needed
    free_blocks: int = 0  # after a refusal, the KV blocks that decode had
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
    roles = decision.demand.required_roles if decision.rejected_prediction is None else tuple(Role)
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


MAX_TIMELINES = 4096  # timelines of ended requests


@dataclass(slots=True)
class Timestamps:
    """Moments of one request; None has not happened in its last attempt."""

    arrival: float
    placed: float | None = None
    reserved: float | None = None
    prefill_ended: float | None = None
    committed: float | None = None
    first_token: float | None = None
    prefill_node: NodeName | None = None
    decode_node: NodeName | None = None
    handoff_report: HandoffReport | None = None
    # digests of the models that its nodes announced, each once
    models: list[str] = field(default_factory=list)

    def mark_placed(
        self, now: float, prefill: NodeName, decode: NodeName, models: Iterable[str] = ()
    ) -> None:
        """Start a new attempt; earlier attempts without a token count as queueing."""
        self.prefill_node, self.decode_node = prefill, decode
        self.models += [model for model in dict.fromkeys(models) if model not in self.models]
        if self.first_token is None:
            self.placed, self.reserved, self.prefill_ended, self.committed, self.handoff_report = (
                now,
                None,
                None,
                None,
                None,
            )

    def mark_moment(self, moment: str, now: float) -> None:
        """Set the moment if it is not set and no token has been emitted."""
        if self.first_token is None and getattr(self, moment) is None:
            setattr(self, moment, now)

    def mark_handoff_skipped(self) -> None:
        """Decode computes the rest of the prompt itself, so there is no transfer."""
        if self.first_token is None:
            self.prefill_ended = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    def build_timeline(self, now: float, attempts: int) -> Timeline:
        end = now if self.first_token is None else self.first_token
        placed = end if self.placed is None else self.placed
        ended = end if self.prefill_ended is None else self.prefill_ended
        edges = [self.arrival]
        for moment in (placed, self.reserved, ended, self.committed, end):
            edges.append(edges[-1] if moment is None else min(max(moment, edges[-1]), end))
        queue, reserve, prefill, transfer, first_token = (edges[i + 1] - edges[i] for i in range(5))
        return Timeline(
            queue=queue,
            reserve=reserve,
            prefill=prefill,
            transfer=transfer,
            first_token=first_token,
            ttft=queue + reserve + prefill + transfer + first_token,
            total=now - self.arrival,
            attempts=attempts,
            prefill_node=self.prefill_node or "",
            decode_node=self.decode_node or "",
            handoff=self.handoff_report,
            models=tuple(self.models),
        )


class TimelineStore:
    """The timelines of the last requests that have ended."""

    def __init__(self, kept: int = MAX_TIMELINES) -> None:
        self._max_kept = kept
        self._timelines: OrderedDict[RequestId, Timeline] = OrderedDict()

    def add_timeline(self, request: RequestId, timeline: Timeline) -> None:
        self._timelines[request] = timeline
        if len(self._timelines) > self._max_kept:
            self._timelines.popitem(last=False)

    def add_handoff_report(self, key: AttemptKey, report: HandoffReport) -> bool:
        """Add a report that arrived after the end; return whether it was the missing one."""
        timeline = self._timelines.get(key.request_id)
        if timeline is None or timeline.attempts != key.attempt_number or timeline.handoff:
            return False
        timeline.handoff = report
        return True

    def get(self, request: RequestId) -> Timeline | None:
        return self._timelines.get(request)
