"""When the slabs of a hand-off were final, and when they had landed."""

from dataclasses import dataclass, replace

from kv_transfer.core.send_queue import ReadyGate


@dataclass(frozen=True, slots=True)
class HandoffProgress:
    """Of what was announced so far. Times are on the plane's clock."""

    last_ready_at: float = 0.0
    last_landed_at: float = 0.0
    landed_before_last_layer: int = 0  # slabs that had landed when the last ones became final

    def with_announced(
        self, gate: ReadyGate | None, num_landed: int, now: float
    ) -> "HandoffProgress":
        """Slabs were announced; `num_landed` others have landed."""
        is_final = gate is None or gate.passed_at is not None
        return self._with_ready(num_landed, now) if is_final else self

    def with_passed(self, gate: ReadyGate, num_landed: int) -> "HandoffProgress":
        """The slabs behind a gate are final."""
        assert gate.passed_at is not None
        return self._with_ready(num_landed, gate.passed_at)

    def _with_ready(self, num_landed: int, now: float) -> "HandoffProgress":
        return replace(self, last_ready_at=now, landed_before_last_layer=num_landed)

    @property
    def exposed_seconds(self) -> float:
        """From the last layer computed to the last slab landed."""
        return max(0.0, self.last_landed_at - self.last_ready_at)

    def commit_seconds(self, now: float) -> float:
        """From there to the commit, which is now."""
        return max(0.0, now - max(self.last_landed_at, self.last_ready_at))
