"""Cost estimates by node or pair, each learned from its own reports, with trials of stale ones.

A node that was slow once, for a passing reason, is not chosen again while there is little load, and
nothing would ever correct its estimate. So an estimate that was not confirmed for
`STALE_AFTER_SECONDS`, while enough requests went elsewhere for trials to stay rare, is predicted as
the fastest of its kind until it is given one request. That is optimism in the face of uncertainty,
for rewards that change (Garivier, Moulines, "On Upper-Confidence Bound Policies for Switching
Bandit Problems", 2011). The first report of a trial restarts the estimate: a node that has
recovered counts as fast at once, and one that is slow waits as long for its next trial.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.online_fit import OnlineLinearFit

STALE_AFTER_SECONDS = 30.0  # seconds
# times the fastest: predictions that are nearer decide nothing (see `ERROR_MARGIN_RANGE` of the
# cost model)
_SLOWER_RATIO = 1.02

FitKey = TypeVar("FitKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TrialClock:
    """The time of a report, also in requests."""

    now: float
    request_count: int  # requests computed so far
    trial_spacing: int  # least number of requests between two trials of the same estimate


@dataclass(slots=True)
class _KeyedFit:
    """One estimate."""

    fit: OnlineLinearFit
    last_seen: TrialClock
    # its own, while a trial is offered with the fastest fit's
    learned_coefficients: tuple[float, ...] | None = None
    restarts_on_report: bool = False  # a trial was given: the next report restarts the fit


class KeyedFits(Generic[FitKey]):
    """The estimates of one kind, at most `most`. `fleet_fit` learns from all reports and stands in
    for keys without reports."""

    def __init__(self, prior: Sequence[float], most: int) -> None:
        self.fleet_fit = OnlineLinearFit(prior)
        self._max_keys = most
        self._fits: OrderedDict[FitKey, _KeyedFit] = (
            OrderedDict()
        )  # who was heard of, or looked at, longest ago is first

    def get_fit(self, key: FitKey) -> OnlineLinearFit:
        known = self._fits.get(key)
        return known.fit if known is not None else self.fleet_fit

    def list_reported_fits(self) -> Iterator[OnlineLinearFit]:
        """Iterate over the fits of all keys that have reported."""
        return (estimate.fit for estimate in self._fits.values() if estimate.fit.mean_error.count)

    def record_report(
        self, key: FitKey, features: tuple[float, ...], seconds: float, moment: TrialClock
    ) -> list[FitKey]:
        """Learn from a report; return the keys whose fit was replaced."""
        changed: list[FitKey] = []
        estimate = self._fits.get(key)
        if estimate is None:
            estimate = self._fits[key] = _KeyedFit(
                OnlineLinearFit(self.fleet_fit.coefficients), moment
            )
            changed.append(key)
        if estimate.learned_coefficients is not None or estimate.restarts_on_report:
            estimate.fit.reset()
            estimate.learned_coefficients, estimate.restarts_on_report = None, False
        estimate.fit.add_observation(features, seconds)
        self.fleet_fit.add_observation(features, seconds)
        estimate.last_seen = moment
        self._fits.move_to_end(key)
        if len(self._fits) > self._max_keys:
            changed.append(self._fits.popitem(last=False)[0])
        self._offer_trials(features, moment)
        return changed

    def on_work_placed(self, key: FitKey) -> None:
        """Work was placed on this key: a trial that was offered is taken."""
        estimate = self._fits.get(key)
        if estimate is not None and estimate.learned_coefficients is not None:
            estimate.fit.coefficients = estimate.learned_coefficients
            estimate.learned_coefficients, estimate.restarts_on_report = None, True

    def _offer_trials(self, features: tuple[float, ...], moment: TrialClock) -> None:
        fastest: OnlineLinearFit | None = None
        for _ in range(len(self._fits)):
            key, estimate = next(iter(self._fits.items()))
            age, passed = (
                moment.now - estimate.last_seen.now,
                moment.request_count - estimate.last_seen.request_count,
            )
            if age < STALE_AFTER_SECONDS or passed < moment.trial_spacing:
                return
            fastest = fastest or min(
                self._trusted_fits(), key=lambda fit: fit.predict(features), default=self.fleet_fit
            )
            estimate.last_seen = moment
            self._fits.move_to_end(key)
            offered = estimate.learned_coefficients is not None
            if offered or estimate.fit.predict(features) > _SLOWER_RATIO * fastest.predict(
                features
            ):
                estimate.learned_coefficients = (
                    estimate.learned_coefficients or estimate.fit.coefficients
                )
                estimate.fit.coefficients = fastest.coefficients

    def _trusted_fits(self) -> Iterator[OnlineLinearFit]:
        """Iterate over the fits that are predicted by their own reports."""
        return (
            each.fit
            for each in self._fits.values()
            if each.learned_coefficients is None and each.fit.mean_error.count
        )
