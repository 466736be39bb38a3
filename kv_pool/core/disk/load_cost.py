"""The cost model of loads: load blocks from disk if that takes less time than to compute them."""

from dataclasses import dataclass

from kv_pool.core.eviction.cost_evictor import QUADRATIC_CONTEXT_TOKENS

_EWMA_WEIGHT = 0.2  # of the newest measurement
_MEASUREMENT_TTL_SECONDS = 60.0  # after this a load is tried again, however slow the last one was
DEFAULT_COMPUTE_SECONDS = 5.0  # assumed until a node has reported its rate


def recompute_seconds(
    first: int, tokens: int, token_seconds: float, quadratic: float = QUADRATIC_CONTEXT_TOKENS
) -> float:
    """Return the seconds to compute `tokens` tokens after the first `first` tokens of a prompt.

    `token_seconds` is the time for one token without context; `quadratic` is the context, in
    tokens, at which a token takes twice as long.
    """
    return token_seconds * tokens * (1 + (first + tokens / 2) / quadratic)


@dataclass(slots=True)
class LoadRateEstimate:
    """Moving averages of the latency and the byte rate of loads."""

    _latency_seconds: float = 0.0
    _seconds_per_byte: float = 0.0
    _measured_at: float | None = None  # seconds: time of the last measurement

    def record_load(self, size: int, wait_seconds: float, read_seconds: float, now: float) -> None:
        """Record a load of `size` bytes that waited and then read for so many seconds."""
        weight = 1.0 if self._measured_at is None else _EWMA_WEIGHT
        self._latency_seconds += weight * (wait_seconds - self._latency_seconds)
        self._seconds_per_byte += weight * (read_seconds / max(1, size) - self._seconds_per_byte)
        self._measured_at = now

    def predict_seconds(self, size: int, now: float) -> float | None:
        """Predict the seconds to load `size` bytes; None without a recent measurement."""
        if self._measured_at is None or now - self._measured_at > _MEASUREMENT_TTL_SECONDS:
            return None
        return self._latency_seconds + size * self._seconds_per_byte


class LoadCostModel:
    """Decides between loading and computing, for one source of blocks."""

    def __init__(self) -> None:
        self.rate = LoadRateEstimate()
        # The rate that a node reported last: not every node computes prompts.
        self._token_seconds: float | None = None

    def max_wait_seconds(
        self, first: int, tokens: int, size: int, token_seconds: float | None, now: float
    ) -> float | None:
        """Return how long to wait for a load before computing is faster; None to decline the load.

        `tokens` tokens after the first `first` ones have `size` bytes; `token_seconds` is the rate
        of the node that looks them up. A load is also tried while its rate is unknown, so that it
        gets measured. Loading costs the same for every block and computing costs more for each
        later block, so either all of the blocks are loaded or none.
        """
        if token_seconds is not None:
            self._token_seconds = token_seconds
        if self._token_seconds is None:
            return DEFAULT_COMPUTE_SECONDS
        compute_seconds = recompute_seconds(first, tokens, self._token_seconds)
        load_seconds = self.rate.predict_seconds(size, now)
        is_worth_loading = load_seconds is None or load_seconds < compute_seconds
        return compute_seconds if is_worth_loading else None
