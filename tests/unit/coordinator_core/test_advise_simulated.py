"""Advice against every split of eight nodes, played through: the real brain on a virtual clock, four workloads."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from baton.ratio import Split
from baton.slo import Slo
from tests.split_cluster import Ask, SplitCluster

NODES, SECONDS = 8, 40.0
SLO = Slo(3.0, 0.064)
GOOD_ENOUGH = 0.9  # of the best split's goodput

Draw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Offered:
    """Poisson arrivals; with `bursts` their rate is threefold for a third of every 12 s, and nothing otherwise."""

    rate: float
    prompt: Draw
    output: Draw
    bursts: bool = False

    def asks(self, seed: int, begin: float = 0.0, seconds: float = SECONDS) -> Iterator[Ask]:
        source, at = random.Random(seed), begin
        while (at := at + source.expovariate(self.rate)) < begin + seconds:
            when = at // 12.0 * 12.0 + at % 12.0 / 3.0 if self.bursts else at
            yield Ask(when, self.prompt(source), self.output(source))


def around(median: float, sigma: float) -> Draw:
    return lambda source: max(1, min(2048, round(source.lognormvariate(math.log(median), sigma))))


def between(low: int, high: int) -> Draw:
    return lambda source: source.randint(low, high)


WORKLOADS = {
    "prompt-heavy": Offered(3.5, around(600, 0.5), between(8, 24)),
    "output-heavy": Offered(6.5, around(100, 0.5), between(80, 160)),
    "balanced": Offered(4.5, around(350, 0.5), between(40, 80)),
    "bursty": Offered(3.3, around(300, 0.8), between(20, 120), bursts=True),
}


def played(offered: Offered, split: Split, least: float = 0.0) -> tuple[float, SplitCluster]:
    """Good requests a second, and the cluster after it. It is given up once it cannot come to `least` any more."""
    cluster = SplitCluster(split.prefill, split.decode)
    asks = list(offered.asks(seed=1))
    cluster.load(asks)
    while cluster.now < SECONDS + 10.0:
        cluster.run(cluster.now + 5.0)
        lost = sum(one.hopeless(SLO, cluster.now) for one in cluster.seen)
        if len(asks) - lost < least * SECONDS:
            break
    return sum(one.good(SLO) for one in cluster.seen) / SECONDS, cluster


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_advised_split_serves_as_much_as_the_best(name: str) -> None:
    """The advice is given in the wrong ratio, of which it knows nothing but what arrives and what things take."""
    offered = WORKLOADS[name]
    _, asked = played(offered, Split(4, 4))
    advice = asked.brain.pilot.advise(SLO, SECONDS).advice
    goodput, _ = played(offered, advice.best)
    best = goodput
    for prefill in range(1, NODES):
        other, _ = played(offered, Split(prefill, NODES - prefill), best)
        best = max(best, other)
    told = f"{advice.best} serves {goodput:.2f}/s, the best {best:.2f}/s"
    assert goodput >= GOOD_ENOUGH * best, told
    assert advice.of(advice.best).goodput == pytest.approx(goodput, rel=0.15), told
