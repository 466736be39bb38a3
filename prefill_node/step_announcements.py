"""Owns the layer callback of each step: its groups of layers, and what it has cost the steps.

Tickets that come while a step is launched on a device wait for the end of the launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.kv.blocks import KVLayout
from baton.process.clock import Clock
from kv_transfer.plane import OutboundPlane
from node_engine.core.step.step_batch import StepBatch
from prefill_node.deferred_tickets import DeferredTickets
from prefill_node.layer_announcer import AnnouncementPlan, BlockRange, LayerAnnouncer
from prefill_node.layer_grouping import LayerGrouping


@dataclass(frozen=True, slots=True)
class AnnouncedStep:
    """What a step has announced to the plane."""

    slowed_seconds: float = 0.0  # by which that slowed it
    group_layers: int = 0  # handed over together; 0: it announced nothing


class StepAnnouncements:
    """Announces the layers of steps. Compute thread only, except `counters` and `tickets`."""

    def __init__(
        self, plane: OutboundPlane, layout: KVLayout, fixed_layers: int, clock: Clock
    ) -> None:
        """`fixed_layers`: layers to hand over together; 0 adapts."""
        self.tickets = DeferredTickets(lambda ticket: plane.set_ticket(ticket.key, ticket))
        self._plane = plane
        self._layout = layout
        self._clock = clock
        self._grouping = LayerGrouping(layout.num_layers, fixed_layers)
        self._announcer: LayerAnnouncer | None = None  # of the step in progress
        self._slowed_seconds = 0.0
        self._num_groups = self._num_layers = 0

    def begin_step(
        self,
        batch: StepBatch,
        pin_blocks: Callable[[], Sequence[BlockRange]],  # that the step completes
        tokens_left: int,  # of the prompt that ends first, after this step
        slowed_seconds: float,  # that the step has waited for cached blocks
    ) -> LayerAnnouncer:
        """The callback of a step that completes blocks of hand-offs."""

        def make_plan() -> AnnouncementPlan:
            completed = pin_blocks()
            layer_bytes = sum(len(each.blocks) for each in completed) * self._layout.slab_bytes
            group_layers = self._grouping.choose_layers(
                batch, self._plane.link_cost, layer_bytes, tokens_left
            )
            return AnnouncementPlan(completed, group_layers)

        self._announcer = LayerAnnouncer(
            self._plane,
            self._layout.num_layers,
            self._clock,
            make_plan,
            self.tickets,
            slowed_seconds,
        )
        return self._announcer

    def end_step(self, batch: StepBatch, seconds: float) -> AnnouncedStep:
        """The step took `seconds`."""
        self.tickets.end_launch()
        announcer, self._announcer = self._announcer, None
        if announcer is None:
            self._grouping.observe_step(batch, seconds, 0.0, 0)
            return AnnouncedStep()
        self._grouping.observe_step(batch, seconds, announcer.slowed_seconds, announcer.num_groups)
        self._slowed_seconds += announcer.slowed_seconds
        self._num_groups += announcer.num_groups
        self._num_layers += announcer.num_announced
        return AnnouncedStep(announcer.slowed_seconds, announcer.plan.group_layers)

    def abandon_step(self) -> None:
        """The step has failed."""
        self.tickets.end_launch()
        self._announcer = None

    def counters(self) -> dict[str, float]:
        return {
            "baton_prefill_slowed_seconds_total": self._slowed_seconds,
            "baton_prefill_layer_groups_total": self._num_groups,
            "baton_prefill_grouped_layers_total": self._num_layers,
        }
