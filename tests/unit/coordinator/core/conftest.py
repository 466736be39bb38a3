"""A brain with one prefill node, and one decode node where a test asks for it."""

import pytest

from baton.types import Incarnation
from tests.unit.coordinator.core.brain_harness import DECODE, PREFILL, BrainHarness


@pytest.fixture
def world() -> BrainHarness:
    return BrainHarness()


@pytest.fixture
def p0(world: BrainHarness) -> Incarnation:
    return world.join_node("p0", PREFILL)


@pytest.fixture
def d0(world: BrainHarness, p0: Incarnation) -> Incarnation:
    return world.join_node("d0", DECODE)
