"""Explains where a request's time went, while it runs and for some time after its end.

An explanation holds counts, times, node names and error messages, never prompt or output text. It
is stored serialized: a request that was served at once takes 0.5 KiB with one node of each role and
0.8 KiB with eight, so 4096 of them take 2 to 3.5 MB. The longest possible one is below 40 KiB, 9 of
them for the names of 255 other choices.

Counts, timelines and explanations of requests that have ended.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.cluster_link import pb_conversion as wire
from baton.errors import BatonError, Cancelled, RequestRejected
from baton.pb import cluster_pb2 as pb
from baton.pb.cluster_pb2 import AttemptReport, Candidate, ExplainResponse, PromptSources
from baton.pb.common_pb2 import HandoffReport, Timeline
from baton.types import AttemptKey, FinishReason, RequestId
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import EndRequest, FinishedResult
from coordinator.core.estimates.workload import StageSeconds, WorkloadMeter
from coordinator.core.placement.interface import LatencyPrediction
from coordinator.core.requests.attempt_trace import ConsideredNode, TimelineStore
from coordinator.core.requests.record import (
    Attempt,
    RequestRecord,
    RequestState,
    compute_token_sources,
)

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


class EndedRequests:
    def __init__(self, counters: Counters, workload: WorkloadMeter, explain_keep: int) -> None:
        self.timelines = TimelineStore()
        self.explanations = ExplanationStore(explain_keep)
        self._counters = counters
        self._workload = workload

    def record_end(
        self, record: RequestRecord, result: FinishReason | BatonError, now: float
    ) -> EndRequest:
        """Record the end and return the terminal event."""
        request, timeline = (
            record.request.id,
            record.timestamps.build_timeline(now, record.attempt_count),
        )
        outcome: FinishedResult | BatonError
        if isinstance(result, FinishReason):
            record.set_state(RequestState.FINISHED)
            label, outcome = (
                result.value,
                FinishedResult(
                    result, record.token_sources.cached_tokens if record.token_sources else 0
                ),
            )
        else:
            record.set_state(RequestState.FAILED)
            label, outcome = result.code, result
        self.timelines.add_timeline(request, timeline)
        self.explanations.add_explanation(build_explanation(record, now, result), now)
        refused = record.admit_deadline is not None and isinstance(result, RequestRejected)
        counter = self._counters.rejected if refused else self._counters.requests
        counter[label, record.tenant_class] += 1
        tokens, ttft = len(record.emitted_token_ids), record.timestamps.ttft
        if not (record.is_internal or isinstance(result, Cancelled)):
            self._measure_latency(
                ttft if isinstance(result, FinishReason) else None, tokens, timeline, now
            )
        return EndRequest(
            request, outcome, tokens, timeline, ttft, record.is_internal, record.tenant_class
        )

    def _measure_latency(
        self, ttft: float | None, tokens: int, timeline: Timeline, now: float
    ) -> None:
        """Record latencies for the SLO; `ttft` None means that the request failed."""
        tpot = (timeline.total - ttft) / (tokens - 1) if ttft is not None and tokens > 1 else None
        stages = StageSeconds(timeline.queue, timeline.reserve, timeline.prefill, timeline.transfer)
        self._workload.record_end(ttft, tpot, stages, now)
