"""Timelines and explanations of requests to protobuf and back."""

from baton.cluster_link import pb_conversion as wire
from baton.cluster_link.report_types import HandoffReport
from baton.pb import cluster_pb2 as pb
from baton.pb import common_pb2
from baton.types import NodeName, RequestId, Role
from coordinator.core.common.settings import ExplanationPacking
from coordinator.core.common.timeline import Timeline
from coordinator.core.placement.interface import (
    ConsideredNode,
    LatencyPrediction,
    PlacementReason,
    PrefillSite,
)
from coordinator.core.requests.explanation import AttemptExplanation, RequestExplanation
from coordinator.core.requests.token_sources import TokenSources


def timeline_to_pb(timeline: Timeline) -> common_pb2.Timeline:
    return common_pb2.Timeline(
        queue=timeline.queue,
        reserve=timeline.reserve,
        prefill=timeline.prefill,
        transfer=timeline.transfer,
        first_token=timeline.first_token,
        ttft=timeline.ttft,
        total=timeline.total,
        attempts=timeline.attempts,
        prefill_node=timeline.prefill_node,
        decode_node=timeline.decode_node,
        handoff=wire.handoff_report_to_pb(timeline.handoff) if timeline.handoff else None,
        models=timeline.models,
        grammar=timeline.grammar,
    )


def timeline_from_pb(message: common_pb2.Timeline) -> Timeline:
    return Timeline(
        queue=message.queue,
        reserve=message.reserve,
        prefill=message.prefill,
        transfer=message.transfer,
        first_token=message.first_token,
        ttft=message.ttft,
        total=message.total,
        attempts=message.attempts,
        prefill_node=message.prefill_node,
        decode_node=message.decode_node,
        handoff=_handoff_from_pb(message),
        models=tuple(message.models),
        grammar=message.grammar,
    )


def explanation_to_pb(explanation: RequestExplanation) -> pb.ExplainResponse:
    response = pb.ExplainResponse(
        request_id=explanation.request_id,
        state=explanation.state,
        error=wire.error_to_pb(explanation.error) if explanation.error else None,
        prompt_tokens=explanation.prompt_tokens,
        output_tokens=explanation.output_tokens,
        max_tokens=explanation.max_tokens,
        timeline=timeline_to_pb(explanation.timeline) if explanation.timeline else None,
        decode=explanation.decode_seconds,
        attempts=map(_attempt_to_pb, explanation.attempts),
        attempts_left_out=explanation.attempts_left_out,
        warm_up=explanation.is_internal,
        others=map(explanation_to_pb, explanation.others),
    )
    if explanation.finish_reason is not None:
        response.finish_reason = wire.FINISH_REASON_TO_PB[explanation.finish_reason]
    if explanation.sources is not None:
        response.sources.CopyFrom(
            pb.PromptSources(**explanation.sources._asdict(), received=explanation.received_tokens)
        )
    return response


def explanation_from_pb(message: pb.ExplainResponse) -> RequestExplanation:
    has_sources = message.HasField("sources")
    return RequestExplanation(
        request_id=RequestId(message.request_id),
        state=message.state,
        finish_reason=wire.FINISH_REASON_FROM_PB.get(message.finish_reason),
        error=wire.error_from_pb(message.error) if message.HasField("error") else None,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        max_tokens=message.max_tokens,
        timeline=timeline_from_pb(message.timeline) if message.HasField("timeline") else None,
        decode_seconds=message.decode,
        sources=_sources_from_pb(message.sources) if has_sources else None,
        received_tokens=message.sources.received,
        attempts=tuple(map(_attempt_from_pb, message.attempts)),
        attempts_left_out=message.attempts_left_out,
        is_internal=message.warm_up,
        others=tuple(map(explanation_from_pb, message.others)),
    )


def _attempt_to_pb(attempt: AttemptExplanation) -> pb.AttemptReport:
    rejected = attempt.rejected_prediction
    return pb.AttemptReport(
        number=attempt.number,
        prefill_node=attempt.prefill_node,
        decode_node=attempt.decode_node,
        placed=attempt.placed,
        reserved=attempt.reserved,
        prefill_ended=attempt.prefill_ended,
        committed=attempt.committed,
        over=attempt.over,
        context_tokens=attempt.context_tokens,
        ended=attempt.outcome,
        reason=attempt.reason,
        needed=attempt.needed_blocks,
        free=attempt.free_blocks,
        **attempt.sources._asdict(),
        received=attempt.received_tokens,
        handoff=wire.handoff_report_to_pb(attempt.handoff) if attempt.handoff else None,
        considered=map(_candidate_to_pb, attempt.considered),
        predicted=_prediction_to_pb(attempt.prediction),
        way=attempt.prefill_site.value,
        why=attempt.placement_reason.value,
        other_way=_prediction_to_pb(rejected) if rejected else None,
        held_back=attempt.held_back_seconds,
        probe=attempt.is_breaker_probe,
        draft_tokens=attempt.draft_tokens,
        accepted_draft_tokens=attempt.accepted_draft_tokens,
    )


def _attempt_from_pb(message: pb.AttemptReport) -> AttemptExplanation:
    return AttemptExplanation(
        number=message.number,
        prefill_node=message.prefill_node,
        decode_node=message.decode_node,
        placed=message.placed,
        reserved=message.reserved if message.HasField("reserved") else None,
        prefill_ended=message.prefill_ended if message.HasField("prefill_ended") else None,
        committed=message.committed if message.HasField("committed") else None,
        over=message.over if message.HasField("over") else None,
        context_tokens=message.context_tokens,
        outcome=message.ended,
        reason=message.reason,
        needed_blocks=message.needed,
        free_blocks=message.free,
        sources=_sources_from_pb(message),
        received_tokens=message.received,
        handoff=_handoff_from_pb(message),
        considered=tuple(map(_candidate_from_pb, message.considered)),
        prediction=_prediction_from_pb(message.predicted),
        prefill_site=PrefillSite(message.way),
        placement_reason=PlacementReason(message.why),
        rejected_prediction=(
            _prediction_from_pb(message.other_way) if message.HasField("other_way") else None
        ),
        held_back_seconds=message.held_back,
        is_breaker_probe=message.probe,
        draft_tokens=message.draft_tokens,
        accepted_draft_tokens=message.accepted_draft_tokens,
    )


def _handoff_from_pb(message: common_pb2.Timeline | pb.AttemptReport) -> HandoffReport | None:
    return wire.handoff_report_from_pb(message.handoff) if message.HasField("handoff") else None


def _sources_from_pb(message: pb.PromptSources | pb.AttemptReport) -> TokenSources:
    return TokenSources(
        message.computed_prefill,
        message.computed_decode,
        message.local_cache,
        message.pool,
        message.remote_pool,
    )


def _prediction_to_pb(prediction: LatencyPrediction) -> pb.Prediction:
    return pb.Prediction(
        queue=prediction.queue_seconds,
        prefill=prediction.prefill_seconds,
        transfer=prediction.transfer_seconds,
        step=prediction.step_seconds,
        output_tokens=prediction.output_tokens,
    )


def _prediction_from_pb(message: pb.Prediction) -> LatencyPrediction:
    """`resident_tokens` is not explained, and 0 here."""
    return LatencyPrediction(
        queue_seconds=message.queue,
        prefill_seconds=message.prefill,
        transfer_seconds=message.transfer,
        step_seconds=message.step,
        output_tokens=message.output_tokens,
        resident_tokens=0.0,
    )


def _candidate_to_pb(node: ConsideredNode) -> pb.Candidate:
    return pb.Candidate(
        node=node.node,
        role=node.role.value,
        attempts=node.attempts,
        uncomputed_tokens=node.uncomputed_tokens,
        room=max(0, node.free_blocks),
        able=node.is_eligible,
        chosen=node.is_chosen,
        held_tokens=node.cached_tokens,
        predicted_seconds=node.predicted_seconds,
        because=node.objection,
    )


def _candidate_from_pb(message: pb.Candidate) -> ConsideredNode:
    has_prediction = message.HasField("predicted_seconds")
    return ConsideredNode(
        node=NodeName(message.node),
        role=Role(message.role),
        attempts=message.attempts,
        uncomputed_tokens=message.uncomputed_tokens,
        free_blocks=message.room,
        is_eligible=message.able,
        is_chosen=message.chosen,
        cached_tokens=message.held_tokens,
        predicted_seconds=message.predicted_seconds if has_prediction else None,
        objection=message.because,
    )


def _unpack_explanation(packed: bytes) -> RequestExplanation:
    return explanation_from_pb(pb.ExplainResponse.FromString(packed))


# A request that was served at once takes 0.5 KiB with one node of each role and 0.8 KiB with
# eight, so 4096 of them take 2 to 3.5 MB. The longest possible one is below 40 KiB, 9 of them for
# the names of 255 other choices.
EXPLANATION_PACKING = ExplanationPacking(
    lambda explanation: explanation_to_pb(explanation).SerializeToString(), _unpack_explanation
)
