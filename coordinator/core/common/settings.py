"""Settings that an operator chooses for the core, and the back-off between failed attempts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from baton.slo import Slo

MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 2.0  # between failed attempts of one request


DEFAULT_SLO = Slo(0.5, 0.05)


class QueueLimits(NamedTuple):
    """Bounds of the waiting queue."""

    max_requests: int  # requests that may wait
    max_tokens: int = 2**62  # prompt tokens that may wait


@dataclass(frozen=True, slots=True)
class ExplanationPacking:
    """How the shell has explanations kept: thousands of them, as compact as its format is."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


UNPACKED = ExplanationPacking(lambda explanation: explanation, lambda explanation: explanation)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrainSettings:
    """All settings of the pure core; the shell builds it from the configuration."""

    mode: Literal["disaggregated", "colocated", "auto"]
    max_queue: int  # requests that may wait
    max_attempts: int  # failed attempts after which a request ends with its error
    # seconds in which a decode node must answer an order that names a KV writer
    reserve_timeout: float
    explain_keep: int = 0  # ended requests that can still be explained
    explanation_packing: ExplanationPacking = UNPACKED
    retry_budget_share: float = 0.2  # retries as a share of recent requests, see `RetryBudget`
    local_prefill_share: float = 0.0  # see `RequestPlacer.get_local_prefill_share`; 0: no bound
    # wait at which service degrades, for classes without max_wait
    degrade_wait_seconds: float = 5.0
    degraded_max_tokens: int = 0  # cap of outputs while service is degraded; 0: no cap
    default_slo: Slo = DEFAULT_SLO  # the SLO that counts unless an operator names another
    max_queue_tokens: int = 2**23  # prompt tokens that may wait

    @property
    def queue_limits(self) -> QueueLimits:
        return QueueLimits(self.max_queue, self.max_queue_tokens)


def retry_backoff_seconds(failures: int) -> float:
    """Return the seconds to wait before a request that has failed so often is placed again. The
    first failure costs no wait, because another node may well serve the request. Later ones are
    spaced out, so that a failing cluster can recover before the last attempt is spent."""
    return (
        min(MIN_BACKOFF_SECONDS * 2.0 ** (failures - 2), MAX_BACKOFF_SECONDS)
        if failures > 1
        else 0.0
    )
