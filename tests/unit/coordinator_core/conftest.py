"""A world of one prefill and one decode node, the latter only where a test asks for it."""

import pytest

from baton.types import Incarnation
from tests.unit.coordinator_core.world import DECODE, PREFILL, World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def p0(world: World) -> Incarnation:
    return world.join("p0", PREFILL)


@pytest.fixture
def d0(world: World, p0: Incarnation) -> Incarnation:
    return world.join("d0", DECODE)
