"""Exhaustive search of the model world."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.transfer.model import World
from tests.unit.transfer.setting import Setting, Violation


def explore(setting: Setting, limit: int = 1_000_000) -> int:
    """Visit every reachable state, nearest first. Returns how many there are; raises Violation with a shortest way to
    it."""
    start = World.start(setting)
    seen = {start.key()}
    frontier: list[tuple[World, Any]] = [(start, ())]
    with _no_garbage_collection():
        while frontier:
            following: list[tuple[World, Any]] = []
            for world, trail in frontier:
                for reached, step in _steps(world, trail):
                    key = reached.key()
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


def _steps(world: World, trail: Any) -> list[tuple[World, str]]:
    step = "nothing more"
    try:
        actions = world.actions()
        if not actions:
            world.check_quiescent()
        reached = []
        for name, who in actions:
            step = f"{name}({who})"
            following = world.clone()
            following.act(name, who)
            reached.append((following, step))
        return reached
    except Violation as violation:
        raise Violation(f"{violation}\nafter {' '.join(_unwind(trail))} {step}") from None


def _unwind(trail: Any) -> list[str]:
    steps = []
    while trail:
        trail, step = trail
        steps.append(step)
    return steps[::-1]
