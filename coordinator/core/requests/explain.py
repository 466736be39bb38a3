"""Explains where a request's time went, while it runs and for some time after its end.

An explanation holds counts, times, node names and error messages, never prompt or output text. It
is stored serialized: a request that was served at once takes 0.5 KiB with one node of each role and
0.8 KiB with eight, so 4096 of them take 2 to 3.5 MB. The longest possible one is below 40 KiB, 9 of
them for the names of 255 other choices.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import AttemptReport, Candidate, ExplainResponse, PromptSources
from baton.pb.common_pb2 import HandoffReport
from baton.types import AttemptKey, FinishReason, RequestId
from coordinator.core.placement.decision import LatencyPrediction
from coordinator.core.requests.attempt_trace import ConsideredNode
from coordinator.core.requests.record import Attempt, RequestRecord
from coordinator.core.requests.token_sources import compute_token_sources

MAX_AGE_SECONDS = 3600.0  # after which an ended request can no longer be explained
_MAX_REASON_CHARS = 500  # characters


def build_explanation(
    record: RequestRecord, now: float, result: FinishReason | BatonError | None = None
) -> ExplainResponse:
    """Explain a request; `result` is None while it runs. Other choices are only named."""
    told = ExplainResponse(
        request_id=record.request.id,
        state=record.state.value,
        prompt_tokens=len(record.request.prompt_token_ids),
        output_tokens=len(record.emitted_token_ids),
        max_tokens=record.request.sampling.max_tokens,
        timeline=record.timestamps.build_timeline(now, record.attempt_count),
        decode=0.0
        if record.timestamps.first_token is None
        else now - record.timestamps.first_token,
        attempts=[
            _attempt_report(attempt, record.timestamps.arrival)
            for attempt in record.attempt_history
        ],
        attempts_left_out=record.attempt_count - len(record.attempt_history),
        warm_up=record.is_internal,
        others=[ExplainResponse(request_id=other) for other in record.sibling_requests],
    )
    if record.token_sources is not None:
        told.sources.CopyFrom(PromptSources(**record.token_sources._asdict()))
        told.sources.received = next(
            (
                a.decode_report.received_tokens
                for a in record.attempt_history
                if a.is_counted and a.decode_report
            ),
            0,
        )
    if isinstance(result, BatonError):
        told.error.CopyFrom(wire.error_to_pb(result))
    elif result is not None:
        told.finish_reason = wire.FINISH_REASON_TO_PB[result]
    return told


def _attempt_report(attempt: Attempt, arrival: float) -> AttemptReport:
    notes, sources = (
        attempt.trace,
        compute_token_sources(attempt.prefill_report, attempt.decode_report),
    )
    report = AttemptReport(
        number=attempt.key.attempt_number,
        prefill_node=notes.prefill_node,
        decode_node=notes.decode_node,
        placed=notes.placed - arrival,
        context_tokens=notes.context_tokens,
        ended=notes.outcome,
        reason=notes.reason[:_MAX_REASON_CHARS],
        needed=notes.needed_blocks,
        free=notes.free_blocks,
        computed_prefill=sources.computed_prefill,
        computed_decode=sources.computed_decode,
        local_cache=sources.local_cache,
        pool=sources.pool,
        remote_pool=sources.remote_pool,
        received=attempt.decode_report.received_tokens if attempt.decode_report else 0,
        handoff=notes.handoff_report,
        considered=[_candidate_to_pb(one) for one in notes.considered],
        predicted=_prediction_to_pb(notes.prediction),
        way=notes.prefill_site.value,
        why=notes.placement_reason.value,
        other_way=_prediction_to_pb(notes.rejected_prediction)
        if notes.rejected_prediction
        else None,
        held_back=notes.held_back_seconds,
        probe=notes.is_breaker_probe,
    )
    for moment in ("reserved", "prefill_ended", "committed", "over"):
        at = getattr(notes, moment)
        if at is not None:
            setattr(report, moment, at - arrival)
    return report


def _prediction_to_pb(one: LatencyPrediction) -> pb.Prediction:
    return pb.Prediction(
        queue=one.queue_seconds,
        prefill=one.prefill_seconds,
        transfer=one.transfer_seconds,
        step=one.step_seconds,
        output_tokens=one.output_tokens,
    )


def _candidate_to_pb(one: ConsideredNode) -> Candidate:
    return Candidate(
        node=one.node,
        role=one.role.value,
        attempts=one.attempts,
        uncomputed_tokens=one.uncomputed_tokens,
        room=max(0, one.free_blocks),
        able=one.is_eligible,
        chosen=one.is_chosen,
        held_tokens=one.cached_tokens,
        predicted_seconds=one.predicted_seconds,
        because=one.objection,
    )


@dataclass(slots=True)
class _StoredExplanation:
    ended_at: float
    payload: bytes


class ExplanationStore:
    """Explanations of the last `max_kept` ended requests, none older than MAX_AGE_SECONDS."""

    def __init__(self, most: int) -> None:
        self.max_kept = most
        self._kept: OrderedDict[RequestId, _StoredExplanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add_explanation(self, told: ExplainResponse, now: float) -> None:
        if self.max_kept:
            self._kept[RequestId(told.request_id)] = _StoredExplanation(
                now, told.SerializeToString()
            )
        while self._kept and (
            len(self._kept) > self.max_kept or self._oldest_ended_at() <= now - MAX_AGE_SECONDS
        ):
            self._kept.popitem(last=False)

    def get(self, request: RequestId, now: float) -> ExplainResponse | None:
        kept = self._kept.get(request)
        return (
            ExplainResponse.FromString(kept.payload)
            if kept and kept.ended_at > now - MAX_AGE_SECONDS
            else None
        )

    def add_handoff_report(self, key: AttemptKey, report: HandoffReport) -> None:
        """Add a report that arrived after the end of the request that it served."""
        kept = self._kept.get(key.request_id)
        if kept is None:
            return
        told = ExplainResponse.FromString(kept.payload)
        told.timeline.handoff.CopyFrom(report)
        for attempt in told.attempts:
            if attempt.number == key.attempt_number:
                attempt.handoff.CopyFrom(report)
        kept.payload = told.SerializeToString()

    def _oldest_ended_at(self) -> float:
        return next(iter(self._kept.values())).ended_at
