"""When blocks are worth bringing here: if that takes less time than computing them, by rates that
were measured."""

from dataclasses import dataclass

from kv_pool.core.eviction.cost_evictor import QUADRATIC_CONTEXT_TOKENS

_EWMA_WEIGHT = 0.2  # of the newest measurement
_MEASUREMENT_TTL_SECONDS = 60.0  # seconds; then the next one is tried, whatever the last one took
DEFAULT_COMPUTE_SECONDS = 5.0  # seconds that computing takes, while nobody knows


def recompute_seconds(
    first: int, tokens: int, token_seconds: float, quadratic: float = QUADRATIC_CONTEXT_TOKENS
) -> float:
    """What computing `tokens` tokens after `first` takes. `token_seconds`: for one token without
    context; `quadratic`: the context, in tokens, at which it takes twice as long."""
    return token_seconds * tokens * (1 + (first + tokens / 2) / quadratic)


@dataclass(slots=True)
class LoadRateEstimate:
    """How fast bytes come, and how long before the first of them does. Everything in bytes and
    seconds."""

    _latency_seconds: float = 0.0
    _seconds_per_byte: float = 0.0
    _measured_at: float | None = None  # of the last measurement

    def record_load(self, size: int, waited: float, took: float, now: float) -> None:
        """`size` bytes took `took`, after `waited`."""
        weight = 1.0 if self._measured_at is None else _EWMA_WEIGHT
        self._latency_seconds += weight * (waited - self._latency_seconds)
        self._seconds_per_byte += weight * (took / max(1, size) - self._seconds_per_byte)
        self._measured_at = now

    def predict_seconds(self, size: int, now: float) -> float | None:
        """What `size` bytes are expected to take; None if nothing was measured of late."""
        if self._measured_at is None or now - self._measured_at > _MEASUREMENT_TTL_SECONDS:
            return None
        return self._latency_seconds + size * self._seconds_per_byte


class LoadCostModel:
    """Load or compute, for one source of blocks."""

    def __init__(self) -> None:
        self.rate = LoadRateEstimate()
        self._token_seconds: float | None = (
            None  # as a node told last: not every node computes prompts
        )

    def max_wait_seconds(
        self, first: int, tokens: int, size: int, token_seconds: float | None, now: float
    ) -> float | None:
        """Seconds that computing `tokens` tokens after `first` takes the node that asks, if loading
        their `size` bytes takes less; else None. What is not known yet is tried: so it gets
        measured. Loading costs the same for every block, and computing more for each later one, so
        it is all of them or none."""
        if token_seconds is not None:
            self._token_seconds = token_seconds
        if self._token_seconds is None:
            return DEFAULT_COMPUTE_SECONDS
        computing = recompute_seconds(first, tokens, self._token_seconds)
        loading = self.rate.predict_seconds(size, now)
        return computing if loading is None or loading < computing else None
