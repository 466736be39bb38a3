"""How long things take, on which node: learned from what nodes report, never asked for.

    prefill   seconds = a + b new + c new (cached + new / 2)    tokens; the last term is attention over what is before
    step      seconds = a + b sequences + c resident            sequences in the batch, tokens in their caches
    link      seconds = a + b bytes                             of a hand-off: what no computing hides, for each pair

A node or pair that has not reported yet is taken for the average of its kind (*fleet*), which learns from everybody.
What is known is kept by name while a node restarts.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from baton.fit import Fit
from baton.types import NodeName

PREFILL_PRIOR = (0.002, 0.05, 0.005)  # seconds: as such, per 1024 tokens, per 1024**2 token pairs
STEP_PRIOR = (0.005, 0.0002, 0.00002)  # as such, per sequence, per 1024 tokens
LINK_PRIOR = (0.001, 0.0005)  # as such, per MiB
MAX_NODES, MAX_PAIRS = 1024, 16384  # remembered, the last used first
MARGINS = 0.02, 0.1  # shares of a prediction
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
    def __init__(self) -> None:
        self.fleet = NodeCosts(Fit(PREFILL_PRIOR), Fit(STEP_PRIOR))
        self._fleet_link = Fit(LINK_PRIOR)
        self._nodes: OrderedDict[NodeName, NodeCosts] = OrderedDict()
        self._links: OrderedDict[tuple[NodeName, NodeName], Fit] = OrderedDict()

    # what things will take, in seconds

    def node(self, name: NodeName) -> NodeCosts:
        """As far as the node has reported; else as the fleet."""
        return self._nodes.get(name, self.fleet)

    def link(self, writer: NodeName, decode: NodeName, size: float) -> float:
        """The exposed part of a hand-off of `size` bytes; 0 if nothing is to be written."""
        fixed, mebi = self._links.get((writer, decode), self._fleet_link).coefficients
        return fixed + mebi * size * _MEBI if size else 0.0

    def any_link(self, size: float) -> float:
        """From a writer that is not chosen yet."""
        fixed, mebi = self._fleet_link.coefficients
        return fixed + mebi * size * _MEBI if size else 0.0

    def least_prefill(self, new: int, cached: int) -> float:
        """On the fastest of the nodes that have reported; 0 before the first one has."""
        return min((node.prefill(new, cached) for node in self._known()), default=0.0)

    def can_prefill_within(self, new: int, cached: int, seconds: float) -> bool:
        """Whether the least is below: most often the first node that is asked says so."""
        if any(node.prefill(new, cached) < seconds for node in self._known()):
            return True
        return self.least_prefill(new, cached) < seconds

    def any_link_line(self, token_bytes: int) -> tuple[float, float]:
        """Likewise: seconds as such, and for each token."""
        fixed, mebi = self._fleet_link.coefficients
        return fixed, mebi * token_bytes * _MEBI

    @property
    def errors(self) -> dict[str, float]:
        """Mean relative error of the fleet's own predictions, by what was predicted."""
        fits = {"prefill": self.fleet.prefill_fit, "step": self.fleet.step_fit, "transfer": self._fleet_link}
        return {name: fit.error.value for name, fit in fits.items() if fit.error.count}

    @property
    def margin(self) -> float:
        """Predictions that differ by a smaller share than this say nothing: as far as they are off, within reason."""
        return min(max(MARGINS[0], self.fleet.prefill_fit.error.value), MARGINS[1])

    # what things took

    def prefill_took(self, name: NodeName, new: int, cached: int, seconds: float) -> None:
        if new > 0:
            features = prefill_features(new, cached)
            self._own(name).prefill_fit.add(features, seconds)
            self.fleet.prefill_fit.add(features, seconds)

    def steps_took(self, name: NodeName, seen: StepsSeen) -> None:
        features = step_features(seen.sequences, seen.resident)
        self._own(name).step_fit.add(features, seen.seconds)
        self.fleet.step_fit.add(features, seen.seconds)

    def transfer_took(self, writer: NodeName, decode: NodeName, size: int, seconds: float) -> None:
        features = (1.0, size * _MEBI)
        pair = (writer, decode)
        if pair not in self._links:
            self._links[pair] = Fit(self._fleet_link.coefficients)
        self._links.move_to_end(pair)
        self._links[pair].add(features, seconds)
        self._fleet_link.add(features, seconds)
        if len(self._links) > MAX_PAIRS:
            self._links.popitem(last=False)

    def _known(self) -> Iterator[NodeCosts]:
        return (node for node in self._nodes.values() if node.prefill_fit.error.count)

    def _own(self, name: NodeName) -> NodeCosts:
        if name not in self._nodes:
            fleet = self.fleet
            self._nodes[name] = NodeCosts(Fit(fleet.prefill_fit.coefficients), Fit(fleet.step_fit.coefficients))
        self._nodes.move_to_end(name)
        if len(self._nodes) > MAX_NODES:
            self._nodes.popitem(last=False)
        return self._nodes[name]
