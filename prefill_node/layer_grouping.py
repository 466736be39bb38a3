"""Chooses how many layers of a step are handed over together, and learns what steps take."""

from collections.abc import Iterable

from baton.online_fit import OnlineLinearFit
from kv_transfer.core.layer_groups import LayeredStep, choose_group_layers
from kv_transfer.core.link_costs import LinkCost
from node_engine.core.step.step_batch import StepBatch

_KILO, _MEBI = 1 / 1024, 1 / 1024**2
# Seconds: constant, per 1024 tokens, per 1024**2 token pairs. The first step scales them.
_STEP_PRIOR = (0.002, 0.05, 0.005)
_ANNOUNCE_PRIOR = 0.00005  # seconds
_NEWEST_STEP_WEIGHT = 0.1  # of the newest step in the moving average of announcements


class LayerGrouping:
    """The choice for each step of one node, from moving averages of the steps before it."""

    def __init__(self, num_layers: int, fixed_layers: int) -> None:
        """`fixed_layers`: what operators have chosen, 0 for none."""
        self._num_layers = num_layers
        self._fixed_layers = fixed_layers
        self._step_fit = OnlineLinearFit(_STEP_PRIOR)
        self._announce_seconds = _ANNOUNCE_PRIOR

    def choose_layers(
        self,
        batch: StepBatch,
        link: LinkCost,
        layer_bytes: int,  # that the step hands over of each layer
        tokens_left: int,  # of the prompt that ends first, after this step
    ) -> int:
        """The number of layers to hand over together in this step."""
        if self._fixed_layers:
            return min(self._fixed_layers, self._num_layers)
        seconds = self._step_fit.predict(_step_features(_list_spans(batch)))
        end = max(slice_.start + len(slice_.token_ids) for slice_ in batch.slices)
        slack = 0.0
        if tokens_left:
            later = self._step_fit.predict(_step_features([(end, tokens_left)]))
            # Later layers are handed over as well, in proportion to their tokens.
            layers = self._num_layers * tokens_left / batch.num_tokens
            slack = max(0.0, later - link.transfer_seconds(layers, layer_bytes))
        step = LayeredStep(
            self._num_layers,
            layer_bytes,
            seconds / self._num_layers,
            self._announce_seconds,
            slack,
        )
        return choose_group_layers(step, link)

    def observe_step(
        self, batch: StepBatch, seconds: float, slowed_seconds: float, groups: int
    ) -> None:
        """A step took `seconds`, of which announcing `groups` groups took `slowed_seconds`."""
        if not batch.slices:
            return
        self._step_fit.add_observation(
            _step_features(_list_spans(batch)), max(0.0, seconds - slowed_seconds)
        )
        if groups:
            newest = slowed_seconds / groups
            self._announce_seconds += _NEWEST_STEP_WEIGHT * (newest - self._announce_seconds)


def _list_spans(batch: StepBatch) -> list[tuple[int, int]]:
    return [(slice_.start, len(slice_.token_ids)) for slice_ in batch.slices]


def _step_features(spans: Iterable[tuple[int, int]]) -> tuple[float, float, float]:
    """Inputs of the cost model for tokens at (position, count)."""
    new = pairs = 0.0
    for start, count in spans:
        new += count
        pairs += count * (start + count / 2)
    return 1.0, new * _KILO, pairs * _MEBI
