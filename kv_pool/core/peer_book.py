"""What is known of the other hosts' pools: how long fetching from each takes, and who is left alone for a while.

    seconds = a + b bytes      from the question to the last block in place, learned from every fetch that ended well

A pool that nothing has been fetched from yet is taken for the average of all. One that failed is not asked for REST
seconds, twice as long after each further failure, so that a dead or slow one costs few requests anything.
"""

from collections import OrderedDict

from baton.fit import Fit

PRIOR = (0.005, 0.001)  # seconds: as such, per MiB
REST, LONGEST_REST = 1.0, 30.0  # seconds
MOST = 256  # pools that are remembered, the last used first
_MEBI = 1 / 1024**2


class _Peer:
    def __init__(self, prior: tuple[float, ...]) -> None:
        self.fetching = Fit(prior)
        self.failures = 0  # one upon the other
        self.rests_until = 0.0


class PeerBook:
    """Of pools, by name. `now` in seconds."""

    def __init__(self) -> None:
        self._average = Fit(PRIOR)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def seconds(self, peer: str, size: int) -> float:
        """What fetching `size` bytes from `peer` takes."""
        known = self._peers.get(peer)
        return (known.fetching if known else self._average).predict(_features(size))

    def rests(self, peer: str, now: float) -> bool:
        known = self._peers.get(peer)
        return known is not None and now < known.rests_until

    def took(self, peer: str, size: int, seconds: float) -> None:
        known = self._known(peer)
        known.failures = 0
        known.fetching.add(_features(size), seconds)
        self._average.add(_features(size), seconds)

    def failed(self, peer: str, now: float) -> None:
        known = self._known(peer)
        known.rests_until = now + min(REST * 2.0**known.failures, LONGEST_REST)
        known.failures = min(known.failures + 1, 16)

    def _known(self, peer: str) -> _Peer:
        if peer not in self._peers:
            self._peers[peer] = _Peer(self._average.coefficients)
        self._peers.move_to_end(peer)
        if len(self._peers) > MOST:
            self._peers.popitem(last=False)
        return self._peers[peer]


def _features(size: int) -> tuple[float, float]:
    return 1.0, size * _MEBI
