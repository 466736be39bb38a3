"""How long things take, on which node: learned from what nodes report, never asked for.

    prefill   seconds = a + b new + c new (cached + new / 2)    tokens; the last term is attention over what is before
    step      seconds = a + b sequences + c resident            sequences in the batch, tokens in their caches
    link      seconds = a + b bytes                             of a hand-off: what no computing hides, for each pair

A node or pair that has not reported yet is taken for the average of its kind (*fleet*), which learns from everybody.
What is known is kept by name while a node restarts. Who was slow and has not been asked for long is tried again: see
`Estimates`.
"""

from dataclasses import dataclass

from baton.fit import Fit
from baton.types import NodeName
from coordinator.core.estimates import Estimates, Moment

PREFILL_PRIOR = (0.002, 0.05, 0.005)  # seconds: as such, per 1024 tokens, per 1024**2 token pairs
STEP_PRIOR = (0.005, 0.0002, 0.00002)  # as such, per sequence, per 1024 tokens
LINK_PRIOR = (0.001, 0.0005)  # as such, per MiB
MAX_NODES, MAX_PAIRS = 1024, 16384  # remembered, the last used first
MARGINS = 0.02, 0.1  # shares of a prediction
TRIAL_SPACING = 16  # requests for each member of a kind between two of its trials: all trials are at most 1 in so many
_KILO, _MEBI = 1 / 1024, 1 / 1024**2


def prefill_features(new: int, cached: int) -> tuple[float, float, float]:
    return 1.0, new * _KILO, new * (cached + new * 0.5) * _MEBI


def step_features(sequences: float, resident: float) -> tuple[float, float, float]:
    return 1.0, sequences, resident * _KILO


@dataclass(frozen=True, slots=True)
class StepsSeen:
    """Decode steps of one node between two of its reports: their mean duration, batch, and tokens in its caches."""

    seconds: float
    sequences: float
    resident: float


class NodeCosts:
    """One node's, or the fleet's. Coefficients are unpacked here, since these two functions are the inner loop of
    placement."""

    def __init__(self, prefill: Fit, step: Fit) -> None:
        self.prefill_fit = prefill
        self.step_fit = step

    def prefill(self, new: int, cached: int) -> float:
        """Seconds to compute `new` tokens behind `cached` ones."""
        fixed, each, pairs = self.prefill_fit.coefficients
        return fixed + new * (each * _KILO + pairs * (cached + new * 0.5) * _MEBI)

    def step(self, sequences: float, resident: float) -> float:
        """Seconds of a decode step."""
        fixed, each, kilo = self.step_fit.coefficients
        return fixed + each * sequences + kilo * resident * _KILO


class CostModel:
    """`members`: nodes that are here."""

    def __init__(self) -> None:
        self.members = 1
        self._requests = 0  # whose prompts were computed
        self._prefill = Estimates[NodeName](PREFILL_PRIOR, MAX_NODES)
        self._step = Estimates[NodeName](STEP_PRIOR, MAX_NODES)
        self._links = Estimates[tuple[NodeName, NodeName]](LINK_PRIOR, MAX_PAIRS)
        self.fleet = NodeCosts(self._prefill.fleet, self._step.fleet)
        self._nodes: dict[NodeName, NodeCosts] = {}

    # what things will take, in seconds

    def node(self, name: NodeName) -> NodeCosts:
        """As far as the node has reported; else as the fleet."""
        return self._nodes.get(name, self.fleet)

    def link(self, writer: NodeName, decode: NodeName, size: float) -> float:
        """The exposed part of a hand-off of `size` bytes; 0 if nothing is to be written."""
        fixed, mebi = self._links.fit_of((writer, decode)).coefficients
        return fixed + mebi * size * _MEBI if size else 0.0

    def any_link(self, size: float) -> float:
        """From a writer that is not chosen yet."""
        fixed, mebi = self._links.fleet.coefficients
        return fixed + mebi * size * _MEBI if size else 0.0

    def least_prefill(self, new: int, cached: int) -> float:
        """On the fastest of the nodes that have reported; 0 before the first one has."""
        features = prefill_features(new, cached)
        return min((fit.predict(features) for fit in self._prefill.reported()), default=0.0)

    def can_prefill_within(self, new: int, cached: int, seconds: float) -> bool:
        """Whether the least is below: most often the first node that is asked says so."""
        features = prefill_features(new, cached)
        if any(fit.predict(features) < seconds for fit in self._prefill.reported()):
            return True
        return self.least_prefill(new, cached) < seconds

    def any_link_line(self, token_bytes: int) -> tuple[float, float]:
        """Likewise: seconds as such, and for each token."""
        fixed, mebi = self._links.fleet.coefficients
        return fixed, mebi * token_bytes * _MEBI

    @property
    def errors(self) -> dict[str, float]:
        """Mean relative error of the fleet's own predictions, by what was predicted."""
        fits = {"prefill": self._prefill.fleet, "step": self._step.fleet, "transfer": self._links.fleet}
        return {name: fit.error.value for name, fit in fits.items() if fit.error.count}

    @property
    def margin(self) -> float:
        """Predictions that differ by a smaller share than this say nothing: as far as they are off, within reason."""
        return min(max(MARGINS[0], self._prefill.fleet.error.value), MARGINS[1])

    # what is asked of whom

    def give_work(self, prefill: NodeName | None, decode: NodeName | None) -> None:
        """An attempt was placed on these nodes: reports of it will follow."""
        computes = prefill or decode
        if computes is not None:
            self._prefill.give_work(computes)
        if decode is not None:
            self._step.give_work(decode)
            if prefill is not None:
                self._links.give_work((prefill, decode))

    # what things took

    def prefill_took(self, name: NodeName, new: int, cached: int, seconds: float, now: float = 0.0) -> None:
        if new > 0:
            self._requests += 1
            moment = self._moment(self.members, now)
            self._follow(self._prefill.add(name, prefill_features(new, cached), seconds, moment))

    def steps_took(self, name: NodeName, seen: StepsSeen, now: float = 0.0) -> None:
        features = step_features(seen.sequences, seen.resident)
        self._follow(self._step.add(name, features, seen.seconds, self._moment(self.members, now)))

    def transfer_took(self, writer: NodeName, decode: NodeName, size: int, seconds: float, now: float = 0.0) -> None:
        most_pairs = max(1, self.members**2 // 4)
        self._links.add((writer, decode), (1.0, size * _MEBI), seconds, self._moment(most_pairs, now))

    def _moment(self, members: int, now: float) -> Moment:
        return Moment(now, self._requests, TRIAL_SPACING * members)

    def _follow(self, changed: list[NodeName]) -> None:
        """These nodes have another fit, or none any more."""
        for name in changed:
            found = NodeCosts(self._prefill.fit_of(name), self._step.fit_of(name))
            if found.prefill_fit is self.fleet.prefill_fit and found.step_fit is self.fleet.step_fit:
                self._nodes.pop(name, None)
            else:
                self._nodes[name] = found
