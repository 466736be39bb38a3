"""What a coordinator's operator decides for its requests, and how long one rests between attempts
that fail."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from baton.slo import Slo

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0  # seconds between attempts that fail


DEFAULT_SLO = Slo(0.5, 0.05)


class QueueLimits(NamedTuple):
    """What may wait: so many requests, and so many prompt tokens."""

    max_requests: int
    max_tokens: int = 2**62


@dataclass(frozen=True, slots=True)
class BrainSettings:
    """`reserve_timeout`: seconds in which decode must answer a Submit that has a writer with
    Reserved or Refused. `explain_keep`: ended requests that can be explained. `retry_budget_share`:
    see `RetryBudget`. `local_prefill_share`: see `RequestPlacer`. `degrade_wait_seconds`: seconds
    that a request may wait to be placed, where its class has no limit, before service is degraded;
    `degraded_max_tokens`: outputs are then capped at this, 0: never. `default_slo`: what counts as
    good, unless another is asked for. `max_queue_tokens`: prompt tokens that may wait."""

    mode: Literal["disaggregated", "colocated", "auto"]
    max_queue: int
    max_attempts: int
    reserve_timeout: float
    explain_keep: int = 0
    retry_budget_share: float = 0.2
    local_prefill_share: float = 0.0
    degrade_wait_seconds: float = 5.0
    degraded_max_tokens: int = 0
    default_slo: Slo = DEFAULT_SLO
    max_queue_tokens: int = 2**23

    @property
    def queue_limits(self) -> QueueLimits:
        return QueueLimits(self.max_queue, self.max_queue_tokens)


def retry_backoff_seconds(failures: int) -> float:
    """Seconds before a request is placed again. The first failure costs none: another node may well
    serve it. A cluster that fails it again and again gets time to mend before the last attempt is
    spent."""
    return (
        min(MIN_BACKOFF_SECONDS * 2.0 ** (failures - 2), MAX_BACKOFF_SECONDS)
        if failures > 1
        else 0.0
    )
