"""One node's change of role.

          attempts ended or placed again      rejoined                 probe succeeded
DRAINING ------------------------------> ORDERED -------> PROBING ------------------> done
   |                                        |              |  ^  |
   +-- called back: recalled                |      failed  v  |  +-- target changed: superseded
   |                                        |             RESTING
   +----------------------------------------+--------------+-- node lost, or back as it was: lost
"""

from dataclasses import dataclass
from enum import Enum

from baton.types import Incarnation, NodeName, RequestId, Role
from coordinator.core.common.effects import RoleSwitchReport

# within which a node that was ordered to switch must have rejoined
ORDER_TIMEOUT_SECONDS = 30.0
PROBE_TIMEOUT_SECONDS = 30.0
PROBE_BACKOFF_SECONDS = 0.5  # between a failed probe and the next


class RoleSwitchPhase(Enum):
    """The phases of a switch, in their usual order."""

    DRAINING = "draining"
    ORDERED = "switching"
    PROBING = "probing"
    RESTING = "resting"


@dataclass(slots=True)
class PendingRoleSwitch:
    """One role switch; times are on the brain's clock, None has not happened."""

    node: NodeName
    incarnation: Incarnation  # the node's present one
    source_role: Role
    target_role: Role
    generation: int  # number of the target split for which it was started
    started_at: float
    phase: RoleSwitchPhase = RoleSwitchPhase.DRAINING
    ordered_at: float | None = None
    joined_at: float | None = None
    due_at: float | None = None  # when time alone ends the phase
    probe_request: RequestId | None = None
    probe_count: int = 0
    detail: str = ""

    def mark_ordered(self, now: float) -> None:
        self.phase, self.ordered_at, self.due_at = (
            RoleSwitchPhase.ORDERED,
            now,
            now + ORDER_TIMEOUT_SECONDS,
        )

    def mark_joined(self, incarnation: Incarnation, now: float) -> None:
        self.incarnation, self.joined_at = incarnation, now

    def start_probe(self, request: RequestId) -> None:
        self.phase, self.probe_request, self.due_at = RoleSwitchPhase.PROBING, request, None
        self.probe_count += 1

    def back_off(self, reason: str, now: float) -> None:
        self.phase, self.probe_request, self.due_at, self.detail = (
            RoleSwitchPhase.RESTING,
            None,
            now + PROBE_BACKOFF_SECONDS,
            reason,
        )

    def build_report(self, outcome: str, now: float, detail: str = "") -> RoleSwitchReport:
        """Report the switch; `outcome` is its phase while it is pending."""
        ordered = now if self.ordered_at is None else self.ordered_at
        joined = now if self.joined_at is None else self.joined_at
        return RoleSwitchReport(
            node=self.node,
            source_role=self.source_role,
            target_role=self.target_role,
            outcome=outcome,
            drain_seconds=ordered - self.started_at,
            switch_seconds=joined - ordered,
            probe_seconds=now - joined,
            detail=detail or self.detail,
            generation=self.generation,
        )
