"""How many layers of a step are handed over together, from what layers and messages take.

A step computes `num_layers` layers one after the other. A group of layers is announced to the
transfer plane when its last layer is computed, and is sent while the next group is computed. Small
groups hide more of the transfer behind computing; each group costs the step an announcement, and
each message costs the link a fixed time. With t seconds a layer, a an announcement, f a message and
s a byte, a group of g layers with b bytes each is computed in C = g t + a and sent in
T(g) = messages(g) f + g b s. A step of n groups has landed after

    max(L t + n a,  C + (n - 1) T(g),  (n - 1) C + T(g)) + T(last group)

from its start: the completion time of a pipeline of two stages, where computing decides, the link
does, or the last but one group, if the last one is small. Sending the step whole is g = L, so the
best g is never predicted to be slower than that.
"""

from dataclasses import dataclass

from kv_transfer.core.link_costs import LinkCost

# A finer group has to gain this share of the predicted time, and need not gain more than so many
# seconds, because predictions are not exact and fewer messages leave more of the machine to others.
_MIN_GAIN, _MAX_MIN_GAIN_SECONDS = 0.005, 0.002


@dataclass(frozen=True, slots=True)
class LayeredStep:
    """What is predicted of one step that hands its layers over."""

    num_layers: int
    layer_bytes: int  # that are handed over of each layer
    layer_seconds: float  # to compute one layer
    announce_seconds: float  # by which announcing a group slows the step
    slack_seconds: float = 0.0  # how much later than the step's end its layers may land

    def predict_seconds(self, group: int, link: LinkCost) -> float:
        """Seconds from the step's start until its layers have landed, with groups of `group`.

        At least until the step has ended. What later steps hide (`slack_seconds`) does not count.
        """
        groups = -(-self.num_layers // group)
        last = self.num_layers - (groups - 1) * group
        computed = self.num_layers * self.layer_seconds + groups * self.announce_seconds
        free = 0.0  # when the link is free for the last group
        if groups > 1:
            first = group * self.layer_seconds + self.announce_seconds
            transfer = link.transfer_seconds(group, self.layer_bytes)
            free = max(first + (groups - 1) * transfer, (groups - 1) * first + transfer)
        landed = max(computed, free) + link.transfer_seconds(last, self.layer_bytes)
        return max(computed, landed - self.slack_seconds)


def choose_group_layers(step: LayeredStep, link: LinkCost) -> int:
    """The number of layers to hand over together: the largest among the fastest.

    All layers, or a power of two of them.
    """
    sizes = [step.num_layers]
    sizes += [1 << bit for bit in reversed(range(step.num_layers.bit_length()))]
    predicted = [step.predict_seconds(size, link) for size in sizes]
    enough = min(predicted) + min(_MIN_GAIN * predicted[0], _MAX_MIN_GAIN_SECONDS)
    return next(size for size, seconds in zip(sizes, predicted, strict=True) if seconds <= enough)
