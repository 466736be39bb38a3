"""Exhaustive search of the model world."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.kv_transfer.model_checking.scenario import InvariantViolation, Scenario
from tests.unit.kv_transfer.model_checking.world import HandoffWorld


def explore_all_states(scenario: Scenario, limit: int = 1_000_000) -> int:
    """Visit every reachable state, nearest first. Returns how many there are; raises Violation with
    a shortest way to it."""
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
    """A third of the time would go into looking for it among the many worlds that are kept."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _next_worlds(world: HandoffWorld, trail: Any) -> list[tuple[HandoffWorld, str]]:
    step = "nothing more"
    try:
        actions = world.list_actions()
        if not actions:
            world.check_quiescent()
        reached = []
        for name, who in actions:
            step = f"{name}({who})"
            following = world.clone()
            following.apply_action(name, who)
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
