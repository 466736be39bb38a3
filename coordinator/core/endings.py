"""What is told, counted and kept of a request that has ended."""

from baton.errors import BatonError, Cancelled, Rejected
from baton.pb.common_pb2 import Timeline
from baton.types import FinishReason
from coordinator.core.counters import Counters
from coordinator.core.explain import Explanations, explain
from coordinator.core.messages import End, Finished
from coordinator.core.record import Record, RequestState
from coordinator.core.timeline import Ring
from coordinator.core.workload import Stages, WorkloadMeter


class Endings:
    def __init__(self, counters: Counters, workload: WorkloadMeter, explain_keep: int) -> None:
        self.timelines = Ring()
        self.explanations = Explanations(explain_keep)
        self._counters = counters
        self._workload = workload

    def add(self, record: Record, result: FinishReason | BatonError, now: float) -> End:
        """The one terminal event."""
        request, timeline = record.request.id, record.marks.timeline(now, record.attempts)
        outcome: Finished | BatonError
        if isinstance(result, FinishReason):
            record.to(RequestState.FINISHED)
            label, outcome = result.value, Finished(result, record.sources.cached if record.sources else 0)
        else:
            record.to(RequestState.FAILED)
            label, outcome = result.code, result
        self.timelines.add(request, timeline)
        self.explanations.add(explain(record, now, result), now)
        refused = record.admit_by is not None and isinstance(result, Rejected)
        counter = self._counters.rejected if refused else self._counters.requests
        counter[label, record.tenant_class] += 1
        tokens, ttft = len(record.emitted), record.marks.ttft
        if not (record.internal or isinstance(result, Cancelled)):
            self._measure(ttft if isinstance(result, FinishReason) else None, tokens, timeline, now)
        return End(request, outcome, tokens, timeline, ttft, record.internal, record.tenant_class)

    def _measure(self, ttft: float | None, tokens: int, timeline: Timeline, now: float) -> None:
        """`ttft` None: it has failed, or was never begun."""
        tpot = (timeline.total - ttft) / (tokens - 1) if ttft is not None and tokens > 1 else None
        stages = Stages(timeline.queue, timeline.reserve, timeline.prefill, timeline.transfer)
        self._workload.ended(ttft, tpot, stages, now)
