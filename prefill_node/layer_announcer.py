"""Announces to the transfer plane which blocks a step completes, by groups of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.errors import HandoffFailed
from baton.kv.device_event import DeviceEvent
from baton.process.clock import Clock
from baton.process.failpoints import FAILPOINTS, failpoint
from baton.types import AttemptKey, BlockIndex
from kv_transfer.plane import OutboundPlane, ReadyGate, reads_device_memory
from prefill_node.deferred_tickets import DeferredTickets

_HOLD_FAILPOINT = "prefill.layer.landed"


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Logical blocks of one attempt that a step completes, and where they are."""

    key: AttemptKey
    first_block: int  # logical block that `blocks` begins with
    blocks: tuple[BlockIndex, ...]


@dataclass(frozen=True, slots=True)
class AnnouncementPlan:
    """What a step announces."""

    ranges: Sequence[BlockRange]
    group_layers: int  # layers of a group; the last group may have fewer


@dataclass(slots=True)
class LayerAnnouncer:
    """A LayerCallback for one step: after each group of layers its blocks may be sent.

    A device's groups are announced while it computes them, each behind a gate that passes when its
    last layer is computed. The plan is made then, too, so that the device does not wait for it.
    """

    plane: OutboundPlane
    num_layers: int
    clock: Clock
    make_plan: Callable[[], AnnouncementPlan]  # called once, before anything is announced
    tickets: DeferredTickets
    slowed_seconds: float = 0.0  # by all that the step waits for because of hand-offs
    num_announced: int = 0  # layers
    num_groups: int = 0  # announced
    _plan: AnnouncementPlan | None = None
    _gates: dict[int, ReadyGate] = field(default_factory=dict)  # by the last layer of their groups

    @property
    def blocks(self) -> Sequence[BlockIndex]:
        """None, if the plane reads the device's own memory."""
        if reads_device_memory(self.plane):
            return ()
        return [block for completed in self.plan.ranges for block in completed.blocks]

    @property
    def plan(self) -> AnnouncementPlan:
        """Made at the first use."""
        if self._plan is None:
            self._plan = self.make_plan()
        return self._plan

    def ends_group(self, layer: int) -> bool:
        computed = layer + 1
        return (
            computed % self.plan.group_layers == 0
            or computed == self.num_layers
            or _HOLD_FAILPOINT in FAILPOINTS.armed
        )

    def on_launching(self) -> None:
        self.tickets.begin_launch()

    def on_launched(self, layer_ends: Sequence[DeviceEvent]) -> None:
        """Announce all layers."""
        for layer in range(self.num_layers):
            if self.ends_group(layer):
                group = range(self.num_announced, layer + 1)
                gate = ReadyGate({each: layer_ends[each] for each in group})
                self._gates[layer] = gate
                self._announce_group(layer + 1, gate)
        self.tickets.end_launch()

    def __call__(self, layer: int) -> None:
        started = self.clock()
        self._complete_layer(layer)
        self._hold_until_landed(layer)
        self.slowed_seconds += self.clock() - started

    @failpoint("prefill.layer")
    def _complete_layer(self, layer: int) -> None:
        gate = self._gates.get(layer)
        if gate is not None:
            gate.mark_passed(self.clock())
        elif layer >= self.num_announced and self.ends_group(layer):
            self._announce_group(layer + 1)

    def _announce_group(self, computed: int, gate: ReadyGate | None = None) -> None:
        first, self.num_announced = self.num_announced, computed
        self.num_groups += 1
        for completed in self.plan.ranges:
            self.plane.announce_layer(
                completed.key,
                first,
                completed.first_block,
                completed.blocks,
                computed - first,
                gate,
            )

    def _hold_until_landed(self, layer: int) -> None:
        """For tests: the failpoint `prefill.layer.landed` holds the next layer."""
        timeout = FAILPOINTS.get_argument(_HOLD_FAILPOINT)
        if timeout is None:
            return
        for completed in self.plan.ranges:
            if not self.plane.wait_for_layer(completed.key, layer, timeout):
                raise HandoffFailed(
                    f"layer {layer} of {completed.key} did not land within {timeout} s"
                )
