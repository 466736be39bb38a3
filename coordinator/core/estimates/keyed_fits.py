"""Costs by node or by pair, each learned from its own reports; and which of them are tried again.

Whoever was slow once, because its machine had a hiccup, is asked no more where little is to be
done, and nothing would ever correct what is known of it. So what has not been confirmed for
`STALE_AFTER_SECONDS` seconds, while so many requests went elsewhere that its trials stay a small
part of all, is predicted as the fastest of its kind until it is given one request. That is optimism
in the face of uncertainty, for rewards that change (Garivier, Moulines, "On Upper-Confidence Bound
Policies for Switching Bandit Problems", 2011). The first report of a trial begins the estimate
anew: whoever is well again counts as such at once, and whoever is slow waits as long for the next
trial.
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
    """`request_count` that have been computed so far, `trial_spacing` of them at least between two
    trials of the same estimate."""

    now: float
    request_count: int
    trial_spacing: int


@dataclass(slots=True)
class _KeyedFit:
    """`learned_coefficients`: its coefficients while a trial is offered, with the fastest one's in
    their place. `restarts_on_report`: a trial was given, and the next report tells of it."""

    fit: OnlineLinearFit
    last_seen: TrialClock
    learned_coefficients: tuple[float, ...] | None = None
    restarts_on_report: bool = False


class KeyedFits(Generic[FitKey]):
    """`fleet_fit` learns from everybody and stands for those that have not reported. At most `most`
    keys are remembered, those that were heard of last."""

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
        """Of all that have reported."""
        return (estimate.fit for estimate in self._fits.values() if estimate.fit.mean_error.count)

    def record_report(
        self, key: FitKey, features: tuple[float, ...], seconds: float, moment: TrialClock
    ) -> list[FitKey]:
        """Learn from a report. Returns the keys whose fit has become another one."""
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
        """Work that will be reported was placed there: a trial that was offered is taken."""
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
        """Of all that are predicted by their own reports."""
        return (
            each.fit
            for each in self._fits.values()
            if each.learned_coefficients is None and each.fit.mean_error.count
        )
