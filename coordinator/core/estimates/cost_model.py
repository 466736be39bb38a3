"""Learns how long work takes on which node from the nodes' reports.

    prefill   seconds = a + b new + c new (cached + new / 2)   tokens; the last term is attention
    step      seconds = a + b sequences + c resident           of a batch; tokens in its caches
    link      seconds = a + b bytes                            exposed transfer time of a pair

A node or pair without reports is predicted as the average of its kind (*fleet*), which learns from
all reports. Estimates are kept by name while a node restarts. A slow node that has not been used
for long is tried again: see `KeyedFits`.

`KeyedFits` learns an estimate for each node or pair from its own reports, with trials of stale
ones. A node that was slow once, for a passing reason, would not be chosen again while there is
little load, and nothing would ever correct its estimate. So an estimate that was not confirmed for
`STALE_AFTER_SECONDS`, while enough requests went elsewhere for trials to stay rare, is predicted as
the fastest of its kind until it is given one request. That is optimism in the face of uncertainty,
for rewards that change (Garivier, Moulines, "On Upper-Confidence Bound Policies for Switching
Bandit Problems", 2011). The first report of a trial restarts the estimate: a node that has
recovered counts as fast at once, and one that is slow waits as long for its next trial.

`DecodeTimePredictor` predicts the time that a placed request takes besides computing its prompt.
That is the delay before the first token (waiting on the node, hand-off) plus the expected number of
tokens, each at the recent mean from the first to the last token of an output, which includes
preemptions and large batches.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.online_fit import OnlineLinearFit
from baton.types import NodeName
from coordinator.core.estimates.workload import OutputLengthPredictor

STALE_AFTER_SECONDS = 30.0
# times the fastest: predictions that are nearer decide nothing (see `ERROR_MARGIN_RANGE` of the
# cost model)
_SLOWER_RATIO = 1.02

FitKey = TypeVar("FitKey", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TrialClock:
    """The moment of a report, in seconds and in number of computed requests."""

    now: float
    computed_requests: int  # number of requests computed so far
    trial_spacing: int  # least number of requests between two trials of the same estimate


@dataclass(slots=True)
class _KeyedFit:
    """The estimate of one key."""

    fit: OnlineLinearFit
    last_seen: TrialClock
    # its own coefficients, while a trial is offered with those of the fastest fit
    learned_coefficients: tuple[float, ...] | None = None
    restarts_on_report: bool = False  # a trial was given: the next report restarts the fit


class KeyedFits(Generic[FitKey]):
    """The estimates of one kind, at most `max_keys`. `fleet_fit` learns from all reports and stands
    in for keys without reports."""

    def __init__(self, prior: Sequence[float], max_keys: int) -> None:
        self.fleet_fit = OnlineLinearFit(prior)
        self._max_keys = max_keys
        self._fits: OrderedDict[FitKey, _KeyedFit] = (
            OrderedDict()
        )  # the key that reported or was looked at longest ago is first

    def get_fit(self, key: FitKey) -> OnlineLinearFit:
        known = self._fits.get(key)
        return known.fit if known is not None else self.fleet_fit

    def list_reported_fits(self) -> Iterator[OnlineLinearFit]:
        """Iterate over the fits of all keys that have reported."""
        return (estimate.fit for estimate in self._fits.values() if estimate.fit.mean_error.count)

    def record_report(
        self, key: FitKey, features: tuple[float, ...], seconds: float, clock: TrialClock
    ) -> list[FitKey]:
        """Learn from a report; return the keys whose fit was replaced."""
        changed: list[FitKey] = []
        estimate = self._fits.get(key)
        if estimate is None:
            estimate = self._fits[key] = _KeyedFit(
                OnlineLinearFit(self.fleet_fit.coefficients), clock
            )
            changed.append(key)
        if estimate.learned_coefficients is not None or estimate.restarts_on_report:
            estimate.fit.reset()
            estimate.learned_coefficients, estimate.restarts_on_report = None, False
        estimate.fit.add_observation(features, seconds)
        self.fleet_fit.add_observation(features, seconds)
        estimate.last_seen = clock
        self._fits.move_to_end(key)
        if len(self._fits) > self._max_keys:
            changed.append(self._fits.popitem(last=False)[0])
        self._offer_trials(features, clock)
        return changed

    def on_work_placed(self, key: FitKey) -> None:
        """Work was placed on this key: a trial that was offered is taken."""
        estimate = self._fits.get(key)
        if estimate is not None and estimate.learned_coefficients is not None:
            estimate.fit.coefficients = estimate.learned_coefficients
            estimate.learned_coefficients, estimate.restarts_on_report = None, True

    def _offer_trials(self, features: tuple[float, ...], clock: TrialClock) -> None:
        fastest: OnlineLinearFit | None = None
        for _ in range(len(self._fits)):
            key, estimate = next(iter(self._fits.items()))
            age, passed = (
                clock.now - estimate.last_seen.now,
                clock.computed_requests - estimate.last_seen.computed_requests,
            )
            if age < STALE_AFTER_SECONDS or passed < clock.trial_spacing:
                return
            fastest = fastest or min(
                self._trusted_fits(), key=lambda fit: fit.predict(features), default=self.fleet_fit
            )
            estimate.last_seen = clock
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
            estimate.fit
            for estimate in self._fits.values()
            if estimate.learned_coefficients is None and estimate.fit.mean_error.count
        )


PREFILL_PRIOR = (0.002, 0.05, 0.005)  # seconds: as such, per 1024 tokens, per 1024**2 token pairs
STEP_PRIOR = (0.005, 0.0002, 0.00002)  # as such, per sequence, per 1024 tokens
LINK_PRIOR = (0.001, 0.0005)  # as such, per MiB
MAX_NODES, MAX_PAIRS = 1024, 16384  # remembered, the last used first
ERROR_MARGIN_RANGE = 0.02, 0.1  # shares of a prediction
# requests for each member of a kind between two of its trials: all trials are at most 1 in so many
TRIAL_SPACING = 16
_KILO, _MEBI = 1 / 1024, 1 / 1024**2


def prefill_features(new: int, cached: int) -> tuple[float, float, float]:
    return 1.0, new * _KILO, new * (cached + new * 0.5) * _MEBI


def _predict_seconds(coefficients: Sequence[float], features: Sequence[float]) -> float:
    return sum(map(float.__mul__, coefficients, features))


def step_features(sequences: float, resident: float) -> tuple[float, float, float]:
    return 1.0, sequences, resident * _KILO


@dataclass(frozen=True, slots=True)
class DecodeStepStats:
    """Means over the decode steps of one node between two of its reports."""

    step_seconds: float
    batch_size: float  # sequences
    resident_tokens: float  # tokens in its caches


class NodeCosts:
    """The costs of one node or of the fleet. Coefficients are unpacked by hand: these two functions
    are the inner loop of placement."""

    def __init__(self, prefill: OnlineLinearFit, step: OnlineLinearFit) -> None:
        self.prefill_fit = prefill
        self.step_fit = step

    def prefill_seconds(self, new: int, cached: int) -> float:
        """Return the seconds to compute `new` tokens after `cached` ones."""
        fixed, per_token, pairs = self.prefill_fit.coefficients
        return fixed + new * (per_token * _KILO + pairs * (cached + new * 0.5) * _MEBI)

    def step_seconds(self, sequences: float, resident: float) -> float:
        """Return the seconds of a decode step."""
        fixed, per_sequence, per_kilotoken = self.step_fit.coefficients
        return fixed + per_sequence * sequences + per_kilotoken * resident * _KILO


class CostModel:
    """Predictions for all nodes and pairs, and what they are learned from."""

    def __init__(self) -> None:
        self.node_count = 1
        self._request_count = 0  # whose prompts were computed
        self._prefill = KeyedFits[NodeName](PREFILL_PRIOR, MAX_NODES)
        self._step = KeyedFits[NodeName](STEP_PRIOR, MAX_NODES)
        self._links = KeyedFits[tuple[NodeName, NodeName]](LINK_PRIOR, MAX_PAIRS)
        self.fleet_costs = NodeCosts(self._prefill.fleet_fit, self._step.fleet_fit)
        self._costs_by_node: dict[NodeName, NodeCosts] = {}

    # predictions, in seconds

    def get_node_costs(self, name: NodeName) -> NodeCosts:
        """Return the node's costs, or the fleet's before its first report."""
        return self._costs_by_node.get(name, self.fleet_costs)

    def transfer_seconds(self, writer: NodeName, decode: NodeName, size: float) -> float:
        """Return the exposed seconds of a hand-off of `size` bytes; 0 for no bytes."""
        fixed, mebi = self._links.get_fit((writer, decode)).coefficients
        return fixed + mebi * size * _MEBI if size else 0.0

    def fleet_transfer_seconds(self, size: float) -> float:
        """Return the exposed seconds of a hand-off from a prefill node that is not chosen yet."""
        fixed, mebi = self._links.fleet_fit.coefficients
        return fixed + mebi * size * _MEBI if size else 0.0

    def fastest_prefill_seconds(self, new: int, cached: int) -> float:
        """Return the prediction of the fastest node; 0 before the first report."""
        features = prefill_features(new, cached)
        return min(
            (
                _predict_seconds(fit.coefficients, features)
                for fit in self._prefill.list_reported_fits()
            ),
            default=0.0,
        )

    def can_prefill_within(self, new: int, cached: int, seconds: float) -> bool:
        """Return whether the fastest node computes a prompt in less than `seconds`."""
        features = prefill_features(new, cached)
        for fit in self._prefill.list_reported_fits():
            if _predict_seconds(fit.coefficients, features) < seconds:
                return True
        return self.fastest_prefill_seconds(new, cached) < seconds

    def fleet_transfer_costs(self, token_bytes: int) -> tuple[float, float]:
        """Return the exposed seconds of a hand-off: fixed, and for each token."""
        fixed, mebi = self._links.fleet_fit.coefficients
        return fixed, mebi * token_bytes * _MEBI

    @property
    def relative_errors(self) -> dict[str, float]:
        """Mean relative errors of the fleet's predictions, by what was predicted."""
        fits = {
            "prefill": self._prefill.fleet_fit,
            "step": self._step.fleet_fit,
            "transfer": self._links.fleet_fit,
        }
        return {name: fit.mean_error.value for name, fit in fits.items() if fit.mean_error.count}

    @property
    def error_margin(self) -> float:
        """Share of a prediction within which others are equal: the usual error, bounded."""
        return min(
            max(ERROR_MARGIN_RANGE[0], self._prefill.fleet_fit.mean_error.value),
            ERROR_MARGIN_RANGE[1],
        )

    # placed work

    def on_work_placed(self, prefill: NodeName | None, decode: NodeName | None) -> None:
        """An attempt was placed on these nodes, so reports of it will follow."""
        computes = prefill or decode
        if computes is not None:
            self._prefill.on_work_placed(computes)
        if decode is not None:
            self._step.on_work_placed(decode)
            if prefill is not None:
                self._links.on_work_placed((prefill, decode))

    # reports

    def record_prefill(
        self, name: NodeName, new: int, cached: int, seconds: float, now: float = 0.0
    ) -> None:
        if new > 0:
            self._request_count += 1
            clock = self._trial_clock(self.node_count, now)
            self._refresh_node_costs(
                self._prefill.record_report(name, prefill_features(new, cached), seconds, clock)
            )

    def record_decode_steps(self, name: NodeName, seen: DecodeStepStats, now: float = 0.0) -> None:
        features = step_features(seen.batch_size, seen.resident_tokens)
        self._refresh_node_costs(
            self._step.record_report(
                name, features, seen.step_seconds, self._trial_clock(self.node_count, now)
            )
        )

    def record_transfer(
        self, writer: NodeName, decode: NodeName, size: int, seconds: float, now: float = 0.0
    ) -> None:
        max_pairs = max(1, self.node_count**2 // 4)
        self._links.record_report(
            (writer, decode), (1.0, size * _MEBI), seconds, self._trial_clock(max_pairs, now)
        )

    def _trial_clock(self, members: int, now: float) -> TrialClock:
        return TrialClock(now, self._request_count, TRIAL_SPACING * members)

    def _refresh_node_costs(self, changed: list[NodeName]) -> None:
        """Update the costs of nodes whose fit was replaced or forgotten."""
        for name in changed:
            found = NodeCosts(self._prefill.get_fit(name), self._step.get_fit(name))
            if (
                found.prefill_fit is self.fleet_costs.prefill_fit
                and found.step_fit is self.fleet_costs.step_fit
            ):
                self._costs_by_node.pop(name, None)
            else:
                self._costs_by_node[name] = found


_NEWEST_WEIGHT = 0.1  # of the newest request in the moving average


class DecodeTimePredictor:
    """Predicts the decode time of a request from recent outputs."""

    def __init__(self, lengths: OutputLengthPredictor) -> None:
        self._lengths = lengths
        self._first_token_delay: float | None = None  # seconds
        self._token_seconds: float | None = None

    def predict_seconds(self, tenant: str, max_tokens: int) -> float:
        """Return the predicted seconds; 0 while nothing is known."""
        more = self._lengths.predict_tokens(tenant, max_tokens) - 1 if max_tokens else 0.0
        return (self._first_token_delay or 0.0) + more * (self._token_seconds or 0.0)

    def record_first_token_delay(self, delay: float) -> None:
        """Record how much later than computing alone a first token came."""
        self._first_token_delay = _moving_average(self._first_token_delay, max(0.0, delay))

    def record_answer(self, tokens: int, seconds: float) -> None:
        """Record an output that was complete `seconds` after its first token."""
        if tokens > 1:
            self._token_seconds = _moving_average(self._token_seconds, seconds / (tokens - 1))


def _moving_average(known: float | None, new: float) -> float:
    return new if known is None else known + _NEWEST_WEIGHT * (new - known)
