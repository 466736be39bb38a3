"""How hard pressed the cluster is, and which steps of degradation could help it. See `Degradation`."""

from collections import Counter

from coordinator.core.degradation import Reading, Step
from coordinator.core.requests import RequestTable
from coordinator.core.settings import Settings

FAILING = 0.2  # of the hand-offs that ended lately: then giving them up helps
_LATELY = 16  # hand-offs


class Strain:
    def __init__(self, table: RequestTable, settings: Settings) -> None:
        self._table = table
        self._settings = settings
        self._seen: Counter[tuple[str, str]] = Counter()  # hand-offs ended, when they were last weighed
        self._failing = False

    def reading(self, now: float) -> Reading:
        self._weigh_handoffs()
        return Reading(self._pressure(now), self._cannot_help())

    def _pressure(self, now: float) -> float | None:
        """The longest wait, over what its class may wait. Who was placed before, and who waits for somebody else's
        prompt, says nothing about the queue."""
        table = self._table
        if table.missing():
            return None
        limits, most = table.admission.tenants.max_wait, 0.0
        for request in table.queue.offered():
            record = table.records[request]
            if record.attempts == 0 and not record.internal:
                limit = limits.get(record.request.standing.tenant_class, self._settings.degrade_wait)
                most = max(most, (now - record.marks.arrival) / limit)
        return most

    def _cannot_help(self) -> dict[Step, str]:
        settings, found = self._settings, {}
        if len(self._table.admission.tenants.classes) < 2:
            found[Step.SHED_LOWEST] = "there is one class"
        if settings.mode == "disaggregated":
            found[Step.SMALLER_TOKEN_BUDGET] = "prefill nodes compute every prompt"
        if not settings.degraded_max_tokens:
            found[Step.CAPPED_OUTPUT] = "--degraded-max-tokens is 0"
        if settings.mode == "colocated":
            found[Step.LOCAL_PREFILL_ONLY] = "there are no hand-offs"
        elif not self._failing:
            found[Step.LOCAL_PREFILL_ONLY] = "hand-offs do not fail"
        return found

    def _weigh_handoffs(self) -> None:
        ended = self._table.counters.handoffs
        fresh = ended - self._seen
        total = sum(fresh.values())
        if total >= _LATELY:
            failed = sum(count for (outcome, _), count in fresh.items() if outcome != "committed")
            self._failing, self._seen = failed >= FAILING * total, Counter(ended)
