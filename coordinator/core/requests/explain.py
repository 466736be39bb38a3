"""Explains where a request's time went, while it runs and for some time after its end.

An explanation holds counts, times, node names and error messages, never prompt or output text. It
is stored serialized: a request that was served at once takes 0.5 KiB with one node of each role and
0.8 KiB with eight, so 4096 of them take 2 to 3.5 MB. The longest possible one is below 40 KiB, 9 of
them for the names of 255 other choices.

`EndedRequests` keeps the counts, timelines and explanations of requests that have ended.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton.cluster_link.report_types import HandoffReport
from baton.errors import BatonError, Cancelled, NotFound, RequestRejected
from baton.types import AttemptKey, FinishReason, RequestId
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import EndRequest, FinishedResult
from coordinator.core.common.settings import UNPACKED, BrainSettings, ExplanationPacking
from coordinator.core.common.timeline import Timeline
from coordinator.core.estimates.workload import StageSeconds, WorkloadMeter
from coordinator.core.requests.explanation import AttemptExplanation, RequestExplanation
from coordinator.core.requests.record import Attempt, RequestRecord, RequestState
from coordinator.core.requests.token_sources import compute_token_sources

MAX_AGE_SECONDS = 3600.0  # after which an ended request can no longer be explained
_MAX_REASON_CHARS = 500  # characters


def build_explanation(
    record: RequestRecord, now: float, result: FinishReason | BatonError | None = None
) -> RequestExplanation:
    """Explain a request; `result` is None while it runs. Other choices are only named."""
    times, history = record.timestamps, record.attempt_history
    received = (
        attempt.decode_report.received_tokens
        for attempt in history
        if attempt.is_counted and attempt.decode_report
    )
    return RequestExplanation(
        request_id=record.request.id,
        state=record.state.value,
        finish_reason=result if isinstance(result, FinishReason) else None,
        error=result if isinstance(result, BatonError) else None,
        prompt_tokens=len(record.request.prompt_token_ids),
        output_tokens=len(record.emitted_token_ids),
        max_tokens=record.request.sampling.max_tokens,
        timeline=times.build_timeline(now, record.attempt_count),
        decode_seconds=0.0 if times.first_token is None else now - times.first_token,
        sources=record.token_sources,
        received_tokens=next(received, 0) if record.token_sources is not None else 0,
        attempts=tuple(_explain_attempt(attempt, times.arrival) for attempt in history),
        attempts_left_out=record.attempt_count - len(history),
        is_internal=record.is_internal,
        others=tuple(RequestExplanation(other) for other in record.sibling_requests),
    )


def _explain_attempt(attempt: Attempt, arrival: float) -> AttemptExplanation:
    def since_arrival(moment: float | None) -> float | None:
        return None if moment is None else moment - arrival

    trace = attempt.trace
    return AttemptExplanation(
        number=attempt.key.attempt_number,
        prefill_node=trace.prefill_node,
        decode_node=trace.decode_node,
        placed=trace.placed - arrival,
        reserved=since_arrival(trace.reserved),
        prefill_ended=since_arrival(trace.prefill_ended),
        committed=since_arrival(trace.committed),
        over=since_arrival(trace.over),
        context_tokens=trace.context_tokens,
        outcome=trace.outcome,
        reason=trace.reason[:_MAX_REASON_CHARS],
        needed_blocks=trace.needed_blocks,
        free_blocks=trace.free_blocks,
        sources=compute_token_sources(attempt.prefill_report, attempt.decode_report),
        received_tokens=attempt.decode_report.received_tokens if attempt.decode_report else 0,
        handoff=trace.handoff_report,
        considered=trace.considered,
        prediction=trace.prediction,
        prefill_site=trace.prefill_site,
        placement_reason=trace.placement_reason,
        rejected_prediction=trace.rejected_prediction,
        held_back_seconds=trace.held_back_seconds,
        is_breaker_probe=trace.is_breaker_probe,
        draft_tokens=trace.draft_tokens,
        accepted_draft_tokens=trace.accepted_draft_tokens,
    )


MAX_TIMELINES = 4096  # timelines of ended requests


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


@dataclass(slots=True)
class _StoredExplanation:
    ended_at: float
    packed: Any


class ExplanationStore:
    """Explanations of the last `max_kept` ended requests, none older than MAX_AGE_SECONDS."""

    def __init__(self, most: int, packing: ExplanationPacking = UNPACKED) -> None:
        self.max_kept = most
        self._packing = packing
        self._kept: OrderedDict[RequestId, _StoredExplanation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add_explanation(self, explanation: RequestExplanation, now: float) -> None:
        if self.max_kept:
            packed = self._packing.pack(explanation)
            self._kept[explanation.request_id] = _StoredExplanation(now, packed)
        while self._kept and (
            len(self._kept) > self.max_kept or self._oldest_ended_at() <= now - MAX_AGE_SECONDS
        ):
            self._kept.popitem(last=False)

    def get(self, request: RequestId, now: float) -> RequestExplanation | None:
        kept = self._kept.get(request)
        if kept is None or kept.ended_at <= now - MAX_AGE_SECONDS:
            return None
        explanation: RequestExplanation = self._packing.unpack(kept.packed)
        return explanation

    def add_handoff_report(self, key: AttemptKey, report: HandoffReport) -> None:
        """Add a report that arrived after the end of the request that it served."""
        kept = self._kept.get(key.request_id)
        if kept is None:
            return
        explanation: RequestExplanation = self._packing.unpack(kept.packed)
        if explanation.timeline is not None:
            explanation.timeline.handoff = report
        attempts = (
            replace(attempt, handoff=report) if attempt.number == key.attempt_number else attempt
            for attempt in explanation.attempts
        )
        kept.packed = self._packing.pack(replace(explanation, attempts=tuple(attempts)))

    def _oldest_ended_at(self) -> float:
        return next(iter(self._kept.values())).ended_at


class EndedRequests:
    """Counts requests that have ended, and keeps what is known of the last ones."""

    def __init__(
        self, counters: Counters, workload: WorkloadMeter, settings: BrainSettings
    ) -> None:
        self.timelines = TimelineStore()
        self.explanations = ExplanationStore(settings.explain_keep, settings.explanation_packing)
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


class RequestExplainer:
    """Explains running and recently ended requests."""

    def __init__(
        self, records: Mapping[RequestId, RequestRecord], explanations: ExplanationStore
    ) -> None:
        self._records = records
        self._explanations = explanations

    def explain_request(self, request: RequestId, now: float) -> RequestExplanation:
        """Explain a request, with its siblings if it is the first choice. Raises NotFound."""
        explanation = self._find_explanation(request, now)
        if explanation is None:
            raise NotFound(
                f"there is no request {request[:64]!r}: the last {self._explanations.max_kept} that"
                f" have ended are kept (--explain-keep), for {MAX_AGE_SECONDS / 3600:g} h at most"
            )
        siblings = (self._explain_sibling(sibling, now) for sibling in explanation.others)
        return replace(explanation, others=tuple(siblings))

    def _explain_sibling(self, named: RequestExplanation, now: float) -> RequestExplanation:
        """Explain another choice, without the nodes that were considered for it."""
        explanation = self._find_explanation(named.request_id, now)
        if explanation is None:
            return named
        attempts = (replace(attempt, considered=()) for attempt in explanation.attempts)
        return replace(explanation, attempts=tuple(attempts))

    def _find_explanation(self, request: RequestId, now: float) -> RequestExplanation | None:
        record = self._records.get(request)
        if record is not None:
            return build_explanation(record, now)
        return self._explanations.get(request, now)
