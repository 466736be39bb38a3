"""Which split of the nodes serves what is asked best, by forecast."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.forecast import Forecast, Forecaster

NEAR = 0.01  # of all requests: forecasts so close are equal
_ROOM = 0.1  # of a node's work: so much less load is no reason to leave a split that serves as well


@dataclass(frozen=True, slots=True)
class Advice:
    """`forecasts`: of the best split, its neighbours and the present one, in the order of their prefill nodes."""

    slo: Slo
    present: Split
    best: Split
    forecasts: tuple[Forecast, ...]
    reason: str

    def of(self, split: Split) -> Forecast:
        return next(one for one in self.forecasts if one.split == split)


def advise(forecaster: Forecaster, candidates: Sequence[Split], present: Split, slo: Slo) -> Advice:
    """`candidates` are all splits that may be; each has a node of both roles, and there is one at least."""
    best, _ = choose(forecaster, candidates, present)
    told = {best, present} | {split for split in candidates if abs(split.prefill - best.prefill) == 1}
    forecasts = [forecaster.of(split) for split in sorted(told, key=lambda split: split.prefill) if _both(split)]
    advice = Advice(slo, present, best, tuple(forecasts), "")
    return Advice(slo, present, best, advice.forecasts, _reason(advice))


def choose(forecaster: Forecaster, candidates: Sequence[Split], present: Split) -> tuple[Split, float]:
    """The split with the most requests within the objective, and their share. Of equals it is the one whose bottleneck
    is loaded least, and the present one if that is hardly more."""
    looked_at = {*forecaster.likely(candidates), *({present} & set(candidates))}
    shares = {split: forecaster.share(split) for split in sorted(looked_at, key=lambda split: split.prefill)}
    most = max(shares.values())
    loads = {split: forecaster.load(split) for split, share in shares.items() if share >= most - NEAR}
    best = min(loads, key=lambda split: loads[split])
    if loads.get(present, 2.0) <= min(loads[best] + _ROOM, 1.0):
        best = present
    return best, shares[best]


def _both(split: Split) -> bool:
    return bool(split.prefill and split.decode)


def _reason(advice: Advice) -> str:
    best = advice.of(advice.best)
    if advice.best == advice.present:
        return f"{advice.present} is predicted to serve {best.share:.0%} within {advice.slo}, and no split more"
    if not _both(advice.present):
        return f"{best.share:.0%} are predicted to be served within {advice.slo}"
    present = advice.of(advice.present)
    role = "prefill" if present.prefill_load > present.decode_load else "decode"
    return (
        f"{best.share:.0%} are predicted to be served within {advice.slo}, {present.share:.0%} with {advice.present}, "
        f"where {role} has {present.load:.0%} of the work that it can do"
    )
