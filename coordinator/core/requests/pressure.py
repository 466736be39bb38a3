"""Measures the pressure on the cluster, and which degradation steps could relieve it.

See `DegradationController` for what follows from the samples.
"""

from collections import Counter
from collections.abc import Mapping

from baton.types import RequestId, Role
from coordinator.core.admission.degradation import HIGH_PRESSURE, DegradationStep, PressureSample
from coordinator.core.admission.waiting_queue import WaitingQueue
from coordinator.core.common.counters import Counters
from coordinator.core.common.effects import DegradationChanged, EffectLog, PlacementSignal
from coordinator.core.common.settings import BrainSettings
from coordinator.core.membership.node_registry import NodeRegistry
from coordinator.core.placement.services import PlacementServices
from coordinator.core.requests.record import RequestRecord

FAILING_HANDOFF_SHARE = 0.2  # share of failed hand-offs from which on giving them up helps
_HANDOFF_SAMPLE = 16  # hand-offs that make a sample


class PressureMonitor:
    """Takes samples of the pressure, and announces the degradation steps that follow from them."""

    def __init__(
        self,
        registry: NodeRegistry,
        records: Mapping[RequestId, RequestRecord],
        queue: WaitingQueue,
        placement: PlacementServices,
        settings: BrainSettings,
        *,
        counters: Counters,
        effects: EffectLog,
        signal: PlacementSignal,
    ) -> None:
        self._registry = registry
        self._records = records
        self._queue = queue
        self._admission = placement.admission
        self._degradation = placement.degradation
        self._settings = settings
        self._counters = counters
        self._effects = effects
        self._signal = signal
        # hand-offs that had ended when failures were last counted: outcome, transport
        self._counted_handoffs: Counter[tuple[str, str]] = Counter()
        self._is_handoff_failing = False

    def update_degradation(self, now: float) -> None:
        """Take a sample, and take or take back a degradation step if it is time for that."""
        change = self._degradation.apply_sample(self.sample(now), now)
        if change is not None:
            self._signal.request_pass()
            self._admission.on_degradation_changed(now)
            self._effects.append_effect(
                DegradationChanged(change.step.value, change.is_taken, change.pressure)
            )

    def sample(self, now: float) -> PressureSample:
        """Return the present pressure and the steps that would not help."""
        self._sample_handoffs()
        if self._registry.why_unavailable(Role.DECODE):
            return PressureSample(None, self._unhelpful_steps({}))
        levels = self._pressure_by_class(now)
        return PressureSample(max(levels.values(), default=0.0), self._unhelpful_steps(levels))

    def _pressure_by_class(self, now: float) -> dict[int, float]:
        """Return, for each priority level, the longest wait over what the class may wait, taken for
        the tenant that waits least: a tenant that floods its own queue does not justify
        degradation. Requests that were placed before, and followers, do not count."""
        longest: dict[tuple[int, str], float] = {}  # by priority level and tenant
        max_wait_seconds = self._admission.tenants.max_wait_seconds
        eligible = set(self._queue.list_eligible())
        for request, record in self._records.items():
            if record.is_internal:
                continue
            principal, wait = record.request.principal, 0.0
            if request in eligible and record.attempt_count == 0:
                wait = (now - record.timestamps.arrival) / max_wait_seconds.get(
                    principal.tenant_class, self._settings.degrade_wait_seconds
                )
            longest[principal.priority_level, principal.tenant] = max(
                wait, longest.get((principal.priority_level, principal.tenant), 0.0)
            )
        levels: dict[int, float] = {}
        for (level, _), wait in longest.items():
            levels[level] = min(wait, levels.get(level, wait))
        return levels

    def _unhelpful_steps(self, levels: Mapping[int, float]) -> dict[DegradationStep, str]:
        settings, unhelpful = self._settings, dict[DegradationStep, str]()
        lowest = len(self._admission.tenants.classes) - 1
        if not lowest:
            unhelpful[DegradationStep.SHED_LOWEST] = "there is one class"
        elif not any(
            pressure >= HIGH_PRESSURE for level, pressure in levels.items() if level < lowest
        ):
            unhelpful[DegradationStep.SHED_LOWEST] = "no other class waits too long"
        if all(
            tenant.tokens_per_second is None for tenant in self._admission.tenants.by_name.values()
        ):
            unhelpful[DegradationStep.SMALLER_TOKEN_BUDGET] = "no tenant has tokens_per_second"
        if not settings.degraded_max_tokens:
            unhelpful[DegradationStep.CAPPED_OUTPUT] = "--degraded-max-tokens is 0"
        if settings.mode == "colocated":
            unhelpful[DegradationStep.LOCAL_PREFILL_ONLY] = "there are no hand-offs"
        elif not self._is_handoff_failing:
            unhelpful[DegradationStep.LOCAL_PREFILL_ONLY] = "hand-offs do not fail"
        return unhelpful

    def _sample_handoffs(self) -> None:
        ended = self._counters.handoffs
        fresh = ended - self._counted_handoffs
        total = sum(fresh.values())
        if total >= _HANDOFF_SAMPLE:
            failed = sum(count for (outcome, _), count in fresh.items() if outcome != "committed")
            self._is_handoff_failing, self._counted_handoffs = (
                failed >= FAILING_HANDOFF_SHARE * total,
                Counter(ended),
            )
