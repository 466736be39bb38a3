"""What the client of one simulated request saw."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.slo import Slo


@dataclass(slots=True)
class SimulatedRequest:
    """Times are those of the cluster's clock, in seconds."""

    tenant: str
    arrived_at: float
    prompt_tokens: int
    first_token_at: float | None = None
    ended_at: float | None = None
    token_count: int = 0  # output tokens that the client has received
    error: BatonError | None = None  # how it failed; also why it was rejected

    @property
    def ttft_seconds(self) -> float:
        assert self.first_token_at is not None, self
        return self.first_token_at - self.arrived_at

    @property
    def tpot_seconds(self) -> float | None:
        """Time per output token after the first one; None without a second token."""
        if self.first_token_at is None or self.ended_at is None or self.token_count < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.token_count - 1)

    @property
    def is_done(self) -> bool:
        return self.ended_at is not None and self.error is None

    def meets_slo(self, slo: Slo) -> bool:
        """Whether it was served within the objective."""
        if self.first_token_at is None or not self.is_done:
            return False
        return slo.is_met(self.ttft_seconds, self.tpot_seconds)

    def has_missed_slo(self, slo: Slo, now: float) -> bool:
        """Whether it has not been served within the objective, and cannot be any more."""
        late = (
            self.first_token_at is None
            and slo.ttft_seconds is not None
            and now - self.arrived_at > slo.ttft_seconds
        )
        return late or (self.ended_at is not None and not self.meets_slo(slo))
