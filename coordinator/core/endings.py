"""What is told, counted and kept of a request that has ended."""

from baton.errors import BatonError, Rejected
from baton.types import FinishReason
from coordinator.core.counters import Counters
from coordinator.core.explain import Explanations, explain
from coordinator.core.messages import End, Finished
from coordinator.core.record import Record, RequestState
from coordinator.core.timeline import Ring


class Endings:
    def __init__(self, counters: Counters, explain_keep: int) -> None:
        self.timelines = Ring()
        self.explanations = Explanations(explain_keep)
        self._counters = counters

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
        return End(request, outcome, tokens, timeline, ttft, record.internal, record.tenant_class)
