"""What `baton explain` shows of one request: counts, times and names, never prompt or output."""

from dataclasses import dataclass

from baton.cluster_link.report_types import HandoffReport
from baton.errors import BatonError
from baton.types import FinishReason, RequestId
from coordinator.core.common.timeline import Timeline
from coordinator.core.placement.interface import (
    ConsideredNode,
    LatencyPrediction,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.requests.token_sources import TokenSources


@dataclass(frozen=True, slots=True)
class AttemptExplanation:
    """One attempt. Times are seconds since the request arrived; None has not happened."""

    number: int  # from 1
    prefill_node: str  # "" if none was chosen
    decode_node: str  # "" if the prefill node answers alone
    placed: float
    reserved: float | None  # decode has reserved blocks
    prefill_ended: float | None  # the prompt is computed
    committed: float | None  # decode has all of the context
    over: float | None  # the attempt has ended
    context_tokens: int  # the prompt, and what the client had by then
    outcome: str  # see `AttemptTrace`
    reason: str  # message of the error that ended it
    needed_blocks: int  # of a refusal
    free_blocks: int  # of a refusal
    sources: TokenSources
    received_tokens: int  # of the context, by hand-off
    handoff: HandoffReport | None
    considered: tuple[ConsideredNode, ...]
    prediction: LatencyPrediction
    prefill_site: PrefillSite
    placement_reason: PlacementReason
    rejected_prediction: LatencyPrediction | None  # of the other prefill site
    held_back_seconds: float  # by the retry budget, before the attempt
    is_breaker_probe: bool
    draft_tokens: int = 0  # that decode verified
    accepted_draft_tokens: int = 0  # of them, those that were drawn as well


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """One request. One that is no longer kept has its id alone."""

    request_id: RequestId
    state: str = ""  # a value of `RequestState`
    finish_reason: FinishReason | None = None  # of one that has finished
    error: BatonError | None = None  # of one that has failed
    prompt_tokens: int = 0
    output_tokens: int = 0  # that the client was sent
    max_tokens: int = 0  # that it may be sent
    timeline: Timeline | None = None  # up to now
    decode_seconds: float = 0.0  # from the first token to the end, or to now
    sources: TokenSources | None = None  # of its first placement, each prompt token once
    received_tokens: int = 0  # of those in `sources`, how many reached decode by hand-off
    attempts: tuple[AttemptExplanation, ...] = ()
    attempts_left_out: int = 0  # in the middle, when there were very many
    is_internal: bool = False  # no client's
    others: "tuple[RequestExplanation, ...]" = ()  # the other choices, explained by the first one
