"""Costs by node or by pair, each learned from its own reports; and which of them are tried again.

Whoever was slow once, because its machine had a hiccup, is asked no more where little is to be done, and nothing would
ever correct what is known of it. So what has not been confirmed for `STALE_AFTER` seconds, while so many requests went
elsewhere that its trials stay a small part of all, is predicted as the fastest of its kind until it is given one
request. That is optimism in the face of uncertainty, for rewards that change (Garivier, Moulines, "On Upper-Confidence
Bound Policies for Switching Bandit Problems", 2011). The first report of a trial begins the estimate anew: whoever is
well again counts as such at once, and whoever is slow waits as long for the next trial.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.fit import Fit

STALE_AFTER = 30.0  # seconds
_SLOWER = 1.02  # times the fastest: predictions that are nearer decide nothing (see `MARGINS` of the cost model)

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Moment:
    """`requests` that have been computed so far, `spacing` of them at least between two trials of the same estimate."""

    now: float
    requests: int
    spacing: int


@dataclass(slots=True)
class _Estimate:
    """`learned`: its coefficients while a trial is offered, with the fastest one's in their place. `begins_anew`: a
    trial was given, and the next report tells of it."""

    fit: Fit
    seen: Moment
    learned: tuple[float, ...] | None = None
    begins_anew: bool = False


class Estimates(Generic[Key]):
    """`fleet` learns from everybody and stands for those that have not reported. At most `most` keys are remembered,
    those that were heard of last."""

    def __init__(self, prior: Sequence[float], most: int) -> None:
        self.fleet = Fit(prior)
        self._most = most
        self._known: OrderedDict[Key, _Estimate] = OrderedDict()  # who was heard of, or looked at, longest ago is first

    def fit_of(self, key: Key) -> Fit:
        known = self._known.get(key)
        return known.fit if known is not None else self.fleet

    def reported(self) -> Iterator[Fit]:
        """Of all that have reported."""
        return (estimate.fit for estimate in self._known.values() if estimate.fit.error.count)

    def add(self, key: Key, features: tuple[float, ...], seconds: float, moment: Moment) -> list[Key]:
        """Learn from a report. Returns the keys whose fit has become another one."""
        changed: list[Key] = []
        estimate = self._known.get(key)
        if estimate is None:
            estimate = self._known[key] = _Estimate(Fit(self.fleet.coefficients), moment)
            changed.append(key)
        if estimate.learned is not None or estimate.begins_anew:
            estimate.fit.begin_anew()
            estimate.learned, estimate.begins_anew = None, False
        estimate.fit.add(features, seconds)
        self.fleet.add(features, seconds)
        estimate.seen = moment
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            changed.append(self._known.popitem(last=False)[0])
        self._offer_trials(features, moment)
        return changed

    def give_work(self, key: Key) -> None:
        """Work that will be reported was placed there: a trial that was offered is taken."""
        estimate = self._known.get(key)
        if estimate is not None and estimate.learned is not None:
            estimate.fit.coefficients = estimate.learned
            estimate.learned, estimate.begins_anew = None, True

    def _offer_trials(self, features: tuple[float, ...], moment: Moment) -> None:
        fastest: Fit | None = None
        for _ in range(len(self._known)):
            key, estimate = next(iter(self._known.items()))
            age, passed = moment.now - estimate.seen.now, moment.requests - estimate.seen.requests
            if age < STALE_AFTER or passed < moment.spacing:
                return
            fastest = fastest or min(self._learned(), key=lambda fit: fit.predict(features), default=self.fleet)
            estimate.seen = moment
            self._known.move_to_end(key)
            offered = estimate.learned is not None
            if offered or estimate.fit.predict(features) > _SLOWER * fastest.predict(features):
                estimate.learned = estimate.learned or estimate.fit.coefficients
                estimate.fit.coefficients = fastest.coefficients

    def _learned(self) -> Iterator[Fit]:
        """Of all that are predicted by their own reports."""
        return (each.fit for each in self._known.values() if each.learned is None and each.fit.error.count)
