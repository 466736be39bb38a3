"""What is known of the other hosts' pools: how long fetching from each takes, and who is left alone for a while.

    seconds = a + b bytes      from the question to the last block in place, learned from every fetch that ended well

A pool that nothing has been fetched from yet is taken for the average of all. One that failed is not asked for REST
seconds, twice as long after each further failure, so that a dead or slow one costs few requests anything. What was
learned of it is kept when it is started again; its failures are its former life's.
"""

from collections import OrderedDict
from dataclasses import dataclass

from baton.fit import Fit
from baton.types import Incarnation, NodeName, PeerAddress

PRIOR = (0.005, 0.001)  # seconds: as such, per MiB
REST, LONGEST_REST = 1.0, 30.0  # seconds
MOST = 256  # pools that are remembered, the last used first
_MEBI = 1 / 1024**2


@dataclass(slots=True)
class _Failing:
    times: int = 0  # one upon the other
    until: float = 0.0


class PeerBook:
    """`now` in seconds."""

    def __init__(self) -> None:
        self._average = Fit(PRIOR)
        self._fits: OrderedDict[NodeName, Fit] = OrderedDict()
        self._failing: OrderedDict[Incarnation, _Failing] = OrderedDict()

    def seconds(self, peer: PeerAddress, size: int) -> float:
        """What fetching `size` bytes from `peer` takes."""
        return self._fits.get(peer.name, self._average).predict(_features(size))

    def rests(self, peer: PeerAddress, now: float) -> bool:
        failing = self._failing.get(peer.incarnation)
        return failing is not None and now < failing.until

    def took(self, peer: PeerAddress, size: int, seconds: float) -> None:
        self._failing.pop(peer.incarnation, None)
        if peer.name not in self._fits:
            self._fits[peer.name] = Fit(self._average.coefficients)
        self._fits.move_to_end(peer.name)
        if len(self._fits) > MOST:
            self._fits.popitem(last=False)
        self._fits[peer.name].add(_features(size), seconds)
        self._average.add(_features(size), seconds)

    def failed(self, peer: PeerAddress, now: float) -> None:
        failing = self._failing.setdefault(peer.incarnation, _Failing())
        failing.until = now + min(REST * 2.0**failing.times, LONGEST_REST)
        failing.times = min(failing.times + 1, 16)
        self._failing.move_to_end(peer.incarnation)
        if len(self._failing) > MOST:
            self._failing.popitem(last=False)


def _features(size: int) -> tuple[float, float]:
    return 1.0, size * _MEBI
