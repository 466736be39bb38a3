"""Lets another thread wait until a layer of a hand-off has landed."""

import threading
from dataclasses import dataclass, field

from kv_transfer.core.outbound_handoff import TERMINAL_STATES, OutboundHandoff
from kv_transfer.core.slabs import SlabRange


@dataclass(slots=True)
class LayerWaiter:
    """The other thread waits for `done`."""

    layer: int
    done: threading.Event = field(default_factory=threading.Event)
    has_landed: bool = False

    def try_finish(self, handoff: OutboundHandoff) -> bool:
        """Wake the other thread if the layer has landed, or the hand-off has ended."""
        has_ended = handoff.state in TERMINAL_STATES
        self.has_landed = not has_ended and _has_layer_landed(handoff, self.layer)
        if has_ended or self.has_landed:
            self.done.set()
        return has_ended or self.has_landed


def _has_layer_landed(handoff: OutboundHandoff, layer: int) -> bool:
    """Whether every announced slab of the layer has landed that decode did not hold before."""
    first = handoff.ticket.first_block if handoff.ticket else 0
    if first >= handoff.num_blocks:
        return True
    layer_slabs = handoff.grid.bitmask(SlabRange(layer, 1, first, handoff.num_blocks - first))
    missing = layer_slabs & handoff.announced_slabs & ~handoff.landed_slabs
    return handoff.ticket is not None and missing == 0
