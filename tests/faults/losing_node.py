"""`python -m tests.faults.losing_node`: a paced node whose device is lost while it serves.

ROLE is the role in which it starts. LOST_IN names the method of the engine that fails, and
LOST_AFTER how many calls of it succeed; warm-up steps are not counted.
"""

import functools
import os
import sys
from typing import Any

from baton.types import Role
from node_engine.core.step.engine import DeviceLost
from node_engine.host.assemble import launch_node
from node_engine.paced.paced_engine import PacedEngine


def lose_device(method_name: str, calls_left: int) -> None:
    """Make a method of every paced engine raise DeviceLost after so many calls."""
    method = getattr(PacedEngine, method_name)
    calls = 0

    @functools.wraps(method)
    def call_or_fail(engine: PacedEngine, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > calls_left:
            raise DeviceLost("CUDA error: an illegal memory access was encountered")
        return method(engine, *args, **kwargs)

    setattr(PacedEngine, method_name, call_or_fail)


if __name__ == "__main__":
    lose_device(os.environ["LOST_IN"], int(os.environ["LOST_AFTER"]))
    sys.exit(launch_node(Role(os.environ["ROLE"])))
