"""How hard pressed the cluster is, and which steps of degradation could help it. See `Degradation`."""

from collections import Counter
from collections.abc import Mapping

from coordinator.core.degradation import HIGH, Reading, Step
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
        if self._table.missing():
            return Reading(None, self._cannot_help({}))
        levels = self._levels(now)
        return Reading(max(levels.values(), default=0.0), self._cannot_help(levels))

    def _levels(self, now: float) -> dict[int, float]:
        """For each class by its place: the longest wait over what it may wait, of that of its tenants with requests
        here who waits least. One that floods its own line is no reason to give anything up. Nor is who was placed
        before, or waits for somebody else's prompt."""
        table, longest = self._table, dict[tuple[int, str], float]()
        limits = table.admission.tenants.max_wait
        offered = set(table.queue.offered())
        for request, record in table.records.items():
            if record.internal:
                continue
            who, wait = record.request.standing, 0.0
            if request in offered and record.attempts == 0:
                wait = (now - record.marks.arrival) / limits.get(who.tenant_class, self._settings.degrade_wait)
            longest[who.level, who.tenant] = max(wait, longest.get((who.level, who.tenant), 0.0))
        levels: dict[int, float] = {}
        for (level, _), wait in longest.items():
            levels[level] = min(wait, levels.get(level, wait))
        return levels

    def _cannot_help(self, levels: Mapping[int, float]) -> dict[Step, str]:
        settings, found = self._settings, dict[Step, str]()
        lowest = len(self._table.admission.tenants.classes) - 1
        if not lowest:
            found[Step.SHED_LOWEST] = "there is one class"
        elif not any(pressure >= HIGH for level, pressure in levels.items() if level < lowest):
            found[Step.SHED_LOWEST] = "no other class waits too long"
        if all(tenant.tokens_per_second is None for tenant in self._table.admission.tenants.tenants.values()):
            found[Step.SMALLER_TOKEN_BUDGET] = "no tenant has tokens_per_second"
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
