"""What clients ask of the cluster, and how well they were served: measured, over a window of time.

Demand is taken from what arrives and never from how busy a device is: a device that decodes is always busy. So it does
not change when a node changes its role, and whoever steers by it does not chase its own moves.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.slo import Slo

KEPT = 480.0  # seconds
MOST = 16384  # arrivals and ends
MOST_LIKE = 256  # that stand for refused ones
_BINS = 30  # of a window, in which arrivals are counted
_SHARE_MEMORY = 256  # prompts after which one counts 1/e
_BURSTS = 0.25, 16.0  # between which the burstiness is believed


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: tokens of its prompt, tokens that its answer is expected to have."""

    prompt: int
    output: float


@dataclass(frozen=True, slots=True)
class Workload:
    """`rate` in requests a second over `seconds`; `requests` are those that were let in. `burstiness`: the variance of
    the number of arrivals over its mean, 1 for a Poisson process. `computed`: the share of prompt tokens that no cache
    had."""

    seconds: float
    rate: float
    burstiness: float
    requests: Sequence[Asked]
    computed: float = 1.0

    @property
    def prefill_tokens(self) -> float:
        """To be computed, a second."""
        return self.rate * self.prompt.mean * self.computed

    @property
    def decode_tokens(self) -> float:
        """A second."""
        return self.rate * self.output.mean

    @property
    def prompt(self) -> "Moments":
        return moments([float(one.prompt) for one in self.requests])

    @property
    def output(self) -> "Moments":
        return moments([one.output for one in self.requests])


@dataclass(frozen=True, slots=True)
class Moments:
    mean: float
    deviation: float

    @property
    def variation(self) -> float:
        """The squared coefficient of variation."""
        return (self.deviation / self.mean) ** 2 if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class Stages:
    """Means of a window in seconds. `queue` in the coordinator; `prefill` and `transfer` as far as the first token
    waited for them."""

    queue: float = 0.0
    reserve: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class Service:
    """How those were served that ended in a window: `good` of `ended` within the objective."""

    ended: int
    good: int

    @property
    def share(self) -> float | None:
        return self.good / self.ended if self.ended else None


@dataclass(frozen=True, slots=True)
class _End:
    at: float
    ttft: float  # infinite for one that failed
    tpot: float | None
    stages: Stages


class WorkloadMeter:
    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, Asked]] = deque(maxlen=MOST)
        self._refused: deque[tuple[int, int]] = deque(maxlen=int(KEPT))  # second, how many
        self._ends: deque[_End] = deque(maxlen=MOST)
        self._began: float | None = None
        self._computed = 1.0

    # what happens

    def arrived(self, prompt: int, output: float, now: float) -> None:
        self._began = now if self._began is None else self._began
        self._arrivals.append((now, Asked(prompt, output)))
        while self._arrivals[0][0] <= now - KEPT:
            self._arrivals.popleft()

    def refused(self, now: float) -> None:
        """One that there was no room for. It is taken to be like the others; only their number is kept, because there
        may be very many."""
        second, count = int(now), 0
        if self._refused and self._refused[-1][0] == second:
            _, count = self._refused.pop()
        self._refused.append((second, count + 1))

    def prompt_done(self, computed: int, cached: int) -> None:
        """In tokens."""
        if computed + cached > 0:
            self._computed += (computed / (computed + cached) - self._computed) / _SHARE_MEMORY

    def ended(self, ttft: float | None, tpot: float | None, stages: Stages, now: float) -> None:
        """In seconds; `ttft` None for a request that failed."""
        self._ends.append(_End(now, math.inf if ttft is None else ttft, tpot, stages))
        while self._ends[0].at <= now - KEPT:
            self._ends.popleft()

    # what it comes to

    def over(self, seconds: float, now: float, waiting: Sequence[tuple[float, Asked]] = ()) -> Workload | None:
        """Of the last `seconds`, or of as many as there are; None if nobody came. Those of `waiting`, with the moments
        when they came, that have waited for longer are counted as asked now: they are still to be served."""
        recent = [(at, one) for at, one in self._arrivals if at > now - seconds]
        left = [one for at, one in waiting if at <= now - seconds]
        if not recent or self._began is None:
            return None
        since = self._arrivals[0][0] if len(self._arrivals) == MOST else self._began  # nobody before that is known
        begin = max(since, now - seconds)
        span = max(now - begin, 1e-3)
        rate = (len(recent) + len(left) + self._refused_since(now - seconds)) / span
        bursts = _burstiness([at - begin for at, _ in recent], span)
        return Workload(span, rate, bursts, [one for _, one in recent] + left, self._computed)

    @property
    def computed(self) -> float:
        """The share of prompt tokens that no cache had."""
        return self._computed

    def since(self, moment: float) -> list[tuple[float, Asked]]:
        """Those that came later than that, and when, with others like them in place of those who were refused."""
        arrived: list[tuple[float, Asked]] = []
        for at, one in reversed(self._arrivals):
            if at <= moment:
                break
            arrived.append((at, one))
        arrived.reverse()
        refused = self._refused_since(moment + 1.0) if arrived else 0
        copies = (arrived[number % len(arrived)] for number in range(min(refused, MOST_LIKE)))
        return sorted([*arrived, *copies], key=lambda pair: pair[0]) if refused else arrived

    def service(self, slo: Slo, seconds: float, now: float) -> Service:
        ended = good = 0
        for end in self._lately(seconds, now):
            ended += 1
            good += slo.met(end.ttft, end.tpot) and end.ttft < math.inf
        return Service(ended + self._refused_since(now - seconds), good)

    def stages(self, seconds: float, now: float) -> Stages:
        """Of those that were served."""
        served = [end.stages for end in self._lately(seconds, now) if end.ttft < math.inf] or [Stages()]
        return Stages(*(math.fsum(getattr(one, name) for one in served) / len(served) for name in Stages.__slots__))

    def _lately(self, seconds: float, now: float) -> Iterator[_End]:
        """The last one first."""
        return takewhile(lambda end: end.at > now - seconds, reversed(self._ends))

    def _refused_since(self, moment: float) -> int:
        return sum(count for second, count in self._refused if second >= moment)


def moments(values: Sequence[float]) -> Moments:
    if not values:
        return Moments(0.0, 0.0)
    mean = math.fsum(values) / len(values)
    return Moments(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)))


def _burstiness(arrivals: Sequence[float], span: float) -> float:
    counts = [0.0] * _BINS
    for at in arrivals:
        counts[min(_BINS - 1, int(at / span * _BINS))] += 1.0
    found = moments(counts)
    return min(max(found.deviation**2 / found.mean, _BURSTS[0]), _BURSTS[1])
