"""Measures the pressure on the cluster, and which degradation steps could relieve it.

See `DegradationController` for what follows from the samples.
"""

from collections import Counter
from collections.abc import Mapping

from coordinator.core.admission.degradation import HIGH_PRESSURE, DegradationStep, PressureSample
from coordinator.core.common.settings import BrainSettings
from coordinator.core.requests.table import RequestTable

FAILING_HANDOFF_SHARE = 0.2  # of recent hand-offs: from here on, giving them up helps
_HANDOFF_SAMPLE = 16  # hand-offs that make a sample


class PressureMonitor:
    def __init__(self, table: RequestTable, settings: BrainSettings) -> None:
        self._table = table
        self._settings = settings
        self._counted_handoffs: Counter[tuple[str, str]] = (
            Counter()
        )  # hand-offs ended, when they were last weighed
        self._is_handoff_failing = False

    def sample(self, now: float) -> PressureSample:
        """Return the present pressure and the steps that would not help."""
        self._sample_handoffs()
        if self._table.why_not_serving():
            return PressureSample(None, self._unhelpful_steps({}))
        levels = self._pressure_by_class(now)
        return PressureSample(max(levels.values(), default=0.0), self._unhelpful_steps(levels))

    def _pressure_by_class(self, now: float) -> dict[int, float]:
        """Return, for each priority level, the longest wait over what the class may wait, taken for
        the tenant that waits least: a tenant that floods its own queue does not justify
        degradation. Requests that were placed before, and followers, do not count."""
        table, longest = self._table, dict[tuple[int, str], float]()
        limits = table.admission.tenants.max_wait_seconds
        offered = set(table.queue.list_eligible())
        for request, record in table.records.items():
            if record.is_internal:
                continue
            who, wait = record.request.principal, 0.0
            if request in offered and record.attempt_count == 0:
                wait = (now - record.timestamps.arrival) / limits.get(
                    who.tenant_class, self._settings.degrade_wait_seconds
                )
            longest[who.priority_level, who.tenant] = max(
                wait, longest.get((who.priority_level, who.tenant), 0.0)
            )
        levels: dict[int, float] = {}
        for (level, _), wait in longest.items():
            levels[level] = min(wait, levels.get(level, wait))
        return levels

    def _unhelpful_steps(self, levels: Mapping[int, float]) -> dict[DegradationStep, str]:
        settings, found = self._settings, dict[DegradationStep, str]()
        lowest = len(self._table.admission.tenants.classes) - 1
        if not lowest:
            found[DegradationStep.SHED_LOWEST] = "there is one class"
        elif not any(
            pressure >= HIGH_PRESSURE for level, pressure in levels.items() if level < lowest
        ):
            found[DegradationStep.SHED_LOWEST] = "no other class waits too long"
        if all(
            tenant.tokens_per_second is None
            for tenant in self._table.admission.tenants.by_name.values()
        ):
            found[DegradationStep.SMALLER_TOKEN_BUDGET] = "no tenant has tokens_per_second"
        if not settings.degraded_max_tokens:
            found[DegradationStep.CAPPED_OUTPUT] = "--degraded-max-tokens is 0"
        if settings.mode == "colocated":
            found[DegradationStep.LOCAL_PREFILL_ONLY] = "there are no hand-offs"
        elif not self._is_handoff_failing:
            found[DegradationStep.LOCAL_PREFILL_ONLY] = "hand-offs do not fail"
        return found

    def _sample_handoffs(self) -> None:
        ended = self._table.counters.handoffs
        fresh = ended - self._counted_handoffs
        total = sum(fresh.values())
        if total >= _HANDOFF_SAMPLE:
            failed = sum(count for (outcome, _), count in fresh.items() if outcome != "committed")
            self._is_handoff_failing, self._counted_handoffs = (
                failed >= FAILING_HANDOFF_SHARE * total,
                Counter(ended),
            )
