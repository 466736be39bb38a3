"""What is kept of an attempt for `baton explain`: the nodes considered, and what became of it."""

from dataclasses import dataclass

from baton.cluster_link.report_types import HandoffReport
from baton.types import NodeName
from coordinator.core.placement.interface import (
    ConsideredNode,
    LatencyPrediction,
    PlacementReason,
    PrefillSite,
)

SERVED, REFUSED = "served", "refused"
_MAX_COUNT = 2**32 - 1  # of tokens, in an explanation


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
    draft_tokens: int = 0  # that decode verified
    accepted_draft_tokens: int = 0  # of them, those that were drawn as well

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

    def add_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count draft tokens that a step has verified, within the bounds of the counts."""
        self.draft_tokens = min(self.draft_tokens + num_tokens, _MAX_COUNT)
        self.accepted_draft_tokens = min(
            self.accepted_draft_tokens + num_accepted, self.draft_tokens
        )

    def mark_ended(self, now: float, ended: str, reason: str = "") -> None:
        """Record the outcome; only the first call counts."""
        if self.over is None:
            self.over, self.outcome, self.reason = now, ended, reason
