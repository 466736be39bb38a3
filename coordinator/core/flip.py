"""One node's change of role.

            attempts ended or placed again      joined in the new role       probe served
DRAINING ------------------------------> ORDERED ------------------> PROBING ------------> done
   |                                        |                        |  ^  |
   +-- called back: recalled                |                failed  v  |  +-- wanted back: superseded
   |                                        |                        RESTING
   +----------------------------------------+------------------------+-- node gone, or came back as it was: lost
"""

from dataclasses import dataclass
from enum import Enum

from baton.types import Incarnation, NodeName, RequestId, Role
from coordinator.core.messages import Switched

ORDER_PATIENCE = 30.0  # seconds in which a node that has nothing placed on it must have joined in its new role
PROBE_TIMEOUT = 30.0
PROBE_REST = 0.5  # seconds between a probe that failed and the next


class Phase(Enum):
    DRAINING = "draining"
    ORDERED = "switching"
    PROBING = "probing"
    RESTING = "resting"


@dataclass(slots=True)
class Flip:
    """`incarnation` is the present one. `generation`: of the ratio for which it began. `due`: when time alone ends the
    phase. Moments on the brain's clock; None has not come."""

    node: NodeName
    incarnation: Incarnation
    source: Role
    to: Role
    generation: int
    began: float
    phase: Phase = Phase.DRAINING
    ordered: float | None = None
    joined: float | None = None
    due: float | None = None
    probe: RequestId | None = None
    probes: int = 0
    detail: str = ""

    def order(self, now: float) -> None:
        self.phase, self.ordered, self.due = Phase.ORDERED, now, now + ORDER_PATIENCE

    def join(self, incarnation: Incarnation, now: float) -> None:
        self.incarnation, self.joined = incarnation, now

    def begin_probe(self, request: RequestId) -> None:
        self.phase, self.probe, self.due = Phase.PROBING, request, None
        self.probes += 1

    def rest(self, reason: str, now: float) -> None:
        self.phase, self.probe, self.due, self.detail = Phase.RESTING, None, now + PROBE_REST, reason

    def report(self, outcome: str, now: float, detail: str = "") -> Switched:
        """As it stands: `outcome` of one that is over, or its phase."""
        ordered = now if self.ordered is None else self.ordered
        joined = now if self.joined is None else self.joined
        return Switched(
            node=self.node,
            source=self.source,
            to=self.to,
            outcome=outcome,
            drain=ordered - self.began,
            switch=joined - ordered,
            probe=now - joined,
            detail=detail or self.detail,
            generation=self.generation,
        )
