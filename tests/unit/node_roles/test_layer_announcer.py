"""A device's layers are announced while it computes them, behind gates that pass in their order."""

from typing import cast

import pytest

from baton.process.clock import monotonic_clock
from baton.process.failpoints import FAILPOINTS
from baton.types import AttemptKey, BlockIndex, RequestId
from kv_transfer.plane import OutboundPlane, ReadyGate
from prefill_node.deferred_tickets import DeferredTickets
from prefill_node.layer_announcer import AnnouncementPlan, BlockRange, LayerAnnouncer
from tests.device_events import IdentityEvent

KEYS = [AttemptKey(RequestId(name), 0, 0) for name in ("a", "b")]
LAYERS = 5


class RecordingPlane:
    """The announcements and passed gates of a plane that reads device memory."""

    endpoint = "device://baton-writer-x.process"

    def __init__(self) -> None:
        self.announced: list[tuple[AttemptKey, int, int, ReadyGate | None]] = []
        self.passed: list[tuple[AttemptKey, ReadyGate]] = []  # in their order

    def announce_layer(
        self,
        key: AttemptKey,
        layer: int,
        first: int,
        source: object,
        num_layers: int = 1,
        gate: ReadyGate | None = None,
    ) -> None:
        self.announced.append((key, layer, num_layers, gate))
        if gate is not None:
            gate.on_passed.append(lambda: self.passed.append((key, gate)))

    def wait_for_layer(self, key: AttemptKey, layer: int, timeout: float) -> bool:
        return True


@pytest.fixture
def plane() -> RecordingPlane:
    return RecordingPlane()


def make_announcer(plane: RecordingPlane, group_layers: int) -> LayerAnnouncer:
    ranges = [BlockRange(key, 3, (BlockIndex(7), BlockIndex(8))) for key in KEYS]
    return LayerAnnouncer(
        cast(OutboundPlane, plane),
        LAYERS,
        monotonic_clock,
        lambda: AnnouncementPlan(ranges, group_layers),
        DeferredTickets(lambda _: None),
    )


def test_groups_are_announced_at_launch_and_pass_with_their_last_layer(
    plane: RecordingPlane,
) -> None:
    announcer = make_announcer(plane, group_layers=2)
    events = [IdentityEvent() for _ in range(LAYERS)]
    announcer.on_launched(events)
    assert [(key, first, count) for key, first, count, _ in plane.announced] == [
        (key, *group) for group in ((0, 2), (2, 2), (4, 1)) for key in KEYS
    ]
    gates = [gate for *_, gate in plane.announced[::2]]
    assert [gate.layer_ends for gate in gates if gate] == [
        {layer: events[layer] for layer in group} for group in ((0, 1), (2, 3), (4,))
    ]
    for layer in range(LAYERS):
        announcer(layer)
        num_passed = len(KEYS) * ((layer + 1) // 2 if layer + 1 < LAYERS else 3)
        assert len(plane.passed) == num_passed
    assert plane.passed == [(key, gate) for gate in gates for key in KEYS]
    assert len(plane.announced) == 3 * len(KEYS)
    assert (announcer.num_groups, announcer.num_announced) == (3, LAYERS)


def test_without_events_groups_are_announced_once_they_are_computed(plane: RecordingPlane) -> None:
    announcer = make_announcer(plane, group_layers=3)
    counts = []
    for layer in range(LAYERS):
        announcer(layer)
        counts.append(len(plane.announced) // len(KEYS))
    assert counts == [0, 0, 1, 1, 2]
    assert [gate for *_, gate in plane.announced] == [None] * 4
    assert not plane.passed


def test_the_failpoint_that_holds_layers_sends_each_by_itself(plane: RecordingPlane) -> None:
    FAILPOINTS.arm("prefill.layer.landed=delay(1)")
    try:
        announcer = make_announcer(plane, group_layers=LAYERS)
        announcer.on_launched([IdentityEvent() for _ in range(LAYERS)])
        assert len(plane.announced) == LAYERS * len(KEYS)
        announcer(0)
        assert len(plane.passed) == len(KEYS)
    finally:
        FAILPOINTS.arm("")
