"""Latency percentiles of recent requests, over a window bounded in time and number."""

from collections import deque
from collections.abc import Sequence

from baton.pb.cluster_pb2 import Latency

WINDOW_SECONDS = 60.0  # seconds
MAX_REQUESTS = 1024  # requests


class LatencyWindow:
    def __init__(self) -> None:
        self._ended: deque[tuple[float, float, float | None]] = deque(maxlen=MAX_REQUESTS)

    def add_request(self, now: float, ttft: float, tpot: float | None) -> None:
        """Add latencies in seconds; a request of one token has no TPOT."""
        self._ended.append((now, ttft, tpot))

    def compute_latency(self, now: float) -> Latency:
        """Return percentiles over the last WINDOW_SECONDS; 0 without requests."""
        while self._ended and self._ended[0][0] <= now - WINDOW_SECONDS:
            self._ended.popleft()
        ttft = sorted(ttft for _, ttft, _ in self._ended)
        tpot = sorted(tpot for _, _, tpot in self._ended if tpot is not None)
        return Latency(
            window_seconds=WINDOW_SECONDS,
            requests=len(self._ended),
            ttft_p50=_nearest_rank(ttft, 0.5),
            ttft_p90=_nearest_rank(ttft, 0.9),
            tpot_p50=_nearest_rank(tpot, 0.5),
            tpot_p90=_nearest_rank(tpot, 0.9),
        )


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return the percentile by the nearest-rank method."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
