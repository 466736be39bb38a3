"""Estimates of how long a fetch from another host's pool takes, and back-off after failures.

    seconds = a + b * bytes

This is the time from the request to the last block in place, fitted to every successful fetch. A
pool from which nothing has been fetched yet is assumed to be like the average of all. After a
failure a pool is not asked for MIN_BACKOFF_SECONDS, and twice as long after each further failure,
so that a dead or slow pool delays few requests. When a pool is restarted its fit is kept, and its
failures are forgotten.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.online_fit import OnlineLinearFit
from baton.types import Incarnation, NodeName, PeerAddress

PRIOR_COEFFICIENTS = (0.005, 0.001)  # seconds; seconds per MiB
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0
MAX_PEERS = 256  # pools to remember; the least recently used is forgotten
_MEBI = 1 / 1024**2


@dataclass(slots=True)
class _FailureStreak:
    failures: int = 0  # consecutive
    backoff_until: float = 0.0  # seconds


class PeerFetchEstimator:
    """Predicts how long fetches from each pool take, and backs off from pools that failed.

    `now` is in seconds.
    """

    def __init__(self) -> None:
        self._average_fit = OnlineLinearFit(PRIOR_COEFFICIENTS)
        self._fits: OrderedDict[NodeName, OnlineLinearFit] = OrderedDict()
        self._failure_streaks: OrderedDict[Incarnation, _FailureStreak] = OrderedDict()

    def predict_fetch_seconds(self, peer: PeerAddress, size: int) -> float:
        """Predict the seconds to fetch `size` bytes from `peer`."""
        return self._fits.get(peer.name, self._average_fit).predict(_features(size))

    def is_backing_off(self, peer: PeerAddress, now: float) -> bool:
        streak = self._failure_streaks.get(peer.incarnation)
        return streak is not None and now < streak.backoff_until

    def record_fetch(self, peer: PeerAddress, size: int, seconds: float) -> None:
        self._failure_streaks.pop(peer.incarnation, None)
        if peer.name not in self._fits:
            self._fits[peer.name] = OnlineLinearFit(self._average_fit.coefficients)
        self._fits.move_to_end(peer.name)
        if len(self._fits) > MAX_PEERS:
            self._fits.popitem(last=False)
        self._fits[peer.name].add_observation(_features(size), seconds)
        self._average_fit.add_observation(_features(size), seconds)

    def record_failure(self, peer: PeerAddress, now: float) -> None:
        streak = self._failure_streaks.setdefault(peer.incarnation, _FailureStreak())
        delay = min(MIN_BACKOFF_SECONDS * 2.0**streak.failures, MAX_BACKOFF_SECONDS)
        streak.backoff_until = now + delay
        streak.failures = min(streak.failures + 1, 16)
        self._failure_streaks.move_to_end(peer.incarnation)
        if len(self._failure_streaks) > MAX_PEERS:
            self._failure_streaks.popitem(last=False)


def _features(size: int) -> tuple[float, float]:
    return 1.0, size * _MEBI
