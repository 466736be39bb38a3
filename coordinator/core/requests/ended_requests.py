"""Counts, timelines and explanations of requests that have ended."""

from baton.errors import BatonError, Cancelled, RequestRejected
from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason
from coordinator.core.common.counters import Counters
from coordinator.core.common.messages import EndRequest, FinishedResult
from coordinator.core.estimates.workload import StageSeconds, WorkloadMeter
from coordinator.core.requests.explain import ExplanationStore, build_explanation
from coordinator.core.requests.record import RequestRecord, RequestState
from coordinator.core.requests.timeline import TimelineStore


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
