"""What is known of the other hosts' pools: how long fetching from each takes, and who is left alone
for a while.

    seconds = a + b bytes      from the question to the last block in place, learned from every fetch that ended well

A pool that nothing has been fetched from yet is taken for the average of all. One that failed is
not asked for REST seconds, twice as long after each further failure, so that a dead or slow one
costs few requests anything. What was learned of it is kept when it is started again; its failures
are its former life's.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.online_fit import OnlineLinearFit
from baton.types import Incarnation, NodeName, PeerAddress

PRIOR_COEFFICIENTS = (0.005, 0.001)  # seconds: as such, per MiB
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0  # seconds
MAX_PEERS = 256  # pools that are remembered, the last used first
_MEBI = 1 / 1024**2


@dataclass(slots=True)
class _FailureStreak:
    failures: int = 0  # one upon the other
    backoff_until: float = 0.0


class PeerFetchEstimator:
    """`now` in seconds."""

    def __init__(self) -> None:
        self._average_fit = OnlineLinearFit(PRIOR_COEFFICIENTS)
        self._fits: OrderedDict[NodeName, OnlineLinearFit] = OrderedDict()
        self._failure_streaks: OrderedDict[Incarnation, _FailureStreak] = OrderedDict()

    def predict_fetch_seconds(self, peer: PeerAddress, size: int) -> float:
        """What fetching `size` bytes from `peer` takes."""
        return self._fits.get(peer.name, self._average_fit).predict(_features(size))

    def is_backing_off(self, peer: PeerAddress, now: float) -> bool:
        failing = self._failure_streaks.get(peer.incarnation)
        return failing is not None and now < failing.backoff_until

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
        failing = self._failure_streaks.setdefault(peer.incarnation, _FailureStreak())
        failing.backoff_until = now + min(
            MIN_BACKOFF_SECONDS * 2.0**failing.failures, MAX_BACKOFF_SECONDS
        )
        failing.failures = min(failing.failures + 1, 16)
        self._failure_streaks.move_to_end(peer.incarnation)
        if len(self._failure_streaks) > MAX_PEERS:
            self._failure_streaks.popitem(last=False)


def _features(size: int) -> tuple[float, float]:
    return 1.0, size * _MEBI
