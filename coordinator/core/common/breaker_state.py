"""The states of a circuit breaker; `placement/breakers.py` moves between them."""

from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"  # hand-offs between the two nodes are placed
    OPEN = "open"  # no hand-off between them is placed until a cool-down has passed
    HALF_OPEN = "half_open"  # one attempt, the probe, may be placed
