"""Recommends the split that is predicted to serve the demand best."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.ratio.split_forecast import SplitForecast, SplitForecaster

EQUAL_ATTAINMENT = 0.01  # forecasts that differ by less are equal
# of a node's work: a smaller gain is no reason to leave the present split
_LOAD_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class RatioAdvice:
    """The best split, and the forecasts that show why."""

    slo: Slo
    current_split: RoleSplit
    best_split: RoleSplit
    # of the best split, its neighbours and the present one, by prefill nodes
    forecasts: tuple[SplitForecast, ...]
    reason: str

    def get_forecast(self, split: RoleSplit) -> SplitForecast:
        return next(forecast for forecast in self.forecasts if forecast.split == split)


def compute_advice(
    forecaster: SplitForecaster, candidates: Sequence[RoleSplit], present: RoleSplit, slo: Slo
) -> RatioAdvice:
    """Choose among `candidates`, which is not empty; each has a node of both roles."""
    best, _ = choose_split(forecaster, candidates, present)
    shown = {best, present} | {
        split for split in candidates if abs(split.prefill_nodes - best.prefill_nodes) == 1
    }
    forecasts = [
        forecaster.forecast_split(split)
        for split in sorted(shown, key=lambda split: split.prefill_nodes)
        if _has_both_roles(split)
    ]
    advice = RatioAdvice(slo, present, best, tuple(forecasts), "")
    return RatioAdvice(slo, present, best, advice.forecasts, _explain_advice(advice))


def choose_split(
    forecaster: SplitForecaster, candidates: Sequence[RoleSplit], present: RoleSplit
) -> tuple[RoleSplit, float]:
    """Return the split with the highest SLO attainment, and that attainment. Of equal ones it is
    the one with the least loaded bottleneck, or the present one if its load is hardly higher."""
    evaluated = {*forecaster.list_least_loaded(candidates), *({present} & set(candidates))}
    shares = {
        split: forecaster.compute_attainment(split)
        for split in sorted(evaluated, key=lambda split: split.prefill_nodes)
    }
    best_share = max(shares.values())
    loads = {
        split: forecaster.compute_bottleneck_load(split)
        for split, share in shares.items()
        if share >= best_share - EQUAL_ATTAINMENT
    }
    best = min(loads, key=lambda split: loads[split])
    if loads.get(present, 2.0) <= min(loads[best] + _LOAD_TOLERANCE, 1.0):
        best = present
    return best, shares[best]


def _has_both_roles(split: RoleSplit) -> bool:
    return bool(split.prefill_nodes and split.decode_nodes)


def _explain_advice(advice: RatioAdvice) -> str:
    best = advice.get_forecast(advice.best_split)
    if advice.best_split == advice.current_split:
        return (
            f"{advice.current_split} is predicted to serve {best.slo_attainment:.0%} within"
            f" {advice.slo}, and no split more"
        )
    if not _has_both_roles(advice.current_split):
        return f"{best.slo_attainment:.0%} are predicted to be served within {advice.slo}"
    present = advice.get_forecast(advice.current_split)
    role = "prefill" if present.prefill_load > present.decode_load else "decode"
    return (
        f"{best.slo_attainment:.0%} are predicted to be served within {advice.slo},"
        f" {present.slo_attainment:.0%} with {advice.current_split}, "
        f"where {role} has {present.bottleneck_load:.0%} of the work that it can do"
    )
