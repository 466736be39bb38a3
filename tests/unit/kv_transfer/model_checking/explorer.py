"""Exhaustive search of the model world."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.kv_transfer.model_checking.scenario import InvariantViolation, Scenario
from tests.unit.kv_transfer.model_checking.world import HandoffWorld


def explore_all_states(scenario: Scenario, limit: int = 1_000_000) -> int:
    """Visit every reachable state, nearest first. Returns how many there are.

    Raises InvariantViolation with a shortest sequence of steps that leads to it."""
    start = HandoffWorld.create(scenario)
    seen = {start.identity_key()}
    frontier: list[tuple[HandoffWorld, Any]] = [(start, ())]
    with _no_garbage_collection():
        while frontier:
            following: list[tuple[HandoffWorld, Any]] = []
            for world, trail in frontier:
                for reached, step in _next_worlds(world, trail):
                    key = reached.identity_key()
                    if key not in seen:
                        seen.add(key)
                        following.append((reached, (trail, step)))
            assert len(seen) < limit, f"more than {limit} states"
            frontier = following
    return len(seen)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Among the many worlds that are kept, garbage collection would take a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _next_worlds(world: HandoffWorld, trail: Any) -> list[tuple[HandoffWorld, str]]:
    step = "no action left"
    try:
        actions = world.list_actions()
        if not actions:
            world.check_quiescent()
        reached = []
        for name, subject in actions:
            step = f"{name}({subject})"
            following = world.clone()
            following.apply_action(name, subject)
            reached.append((following, step))
        return reached
    except InvariantViolation as violation:
        raise InvariantViolation(
            f"{violation}\nafter {' '.join(_unwind_trail(trail))} {step}"
        ) from None


def _unwind_trail(trail: Any) -> list[str]:
    steps = []
    while trail:
        trail, step = trail
        steps.append(step)
    return steps[::-1]
