"""What a split of the nodes would make of a workload: time to first token, time per output token, goodput.

Prefill nodes are the places of one queue (`queueing`); a prompt takes as long as the cost model says. A decode node
with a batch of n makes a step in `fixed + each n` seconds. By Little's law the batch is what comes while one is there:

    n = rate / nodes  output (fixed + each (n + 1 / nodes))

for placement keeps batches equal; in their places are also those whose prompts are being computed. The variance of the
batch is that of a linear noise approximation around n (van Kampen, "Stochastic Processes in Physics and
Chemistry", 1981, X), and what one answer sees of it is its average over the answer's time. Places on decode nodes are a
second queue; who needs both waits for the scarcer.

Nothing is said of the split where decode computes the prompts itself.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.ratio import Split
from baton.slo import Slo
from coordinator.core.cost_model import NodeCosts
from coordinator.core.queueing import Waiting, normal_above
from coordinator.core.workload import Workload, moments

HORIZON = 60.0  # seconds for which the workload is taken to last: how long a line can grow
_POINTS = 32  # prompts that stand for all of them
_BISECTIONS = 24
_LIKELY = 16  # splits that are worth a closer look
_SAMPLE = 1024  # requests
_UNEVEN = 0.25  # variance of batches that placement keeps as equal as whole sequences can be


@dataclass(frozen=True, slots=True)
class Machine:
    """One node as all of them are taken to be. `slots`: sequences at once; `cache_tokens`: that its cache holds;
    `transfer`: seconds of a hand-off that no computing hides, as such and for each token."""

    costs: NodeCosts
    slots: int
    cache_tokens: int
    transfer: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds; `share` of the requests within the objective, `goodput` of them a second. `prefill_load` and
    `decode_load`: work that comes over what the nodes of the role can do."""

    split: Split
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot: float
    share: float
    goodput: float
    prefill_load: float
    decode_load: float

    @property
    def load(self) -> float:
        """Of the role that is the bottleneck."""
        return max(self.prefill_load, self.decode_load)


class Forecaster:
    """Of one workload on so many nodes of one kind."""

    def __init__(self, workload: Workload, machine: Machine, slo: Slo) -> None:
        self.workload = workload
        self._slo = slo
        self._machine = machine
        fixed, each_token = machine.transfer
        costs, share = machine.costs, workload.computed
        requests = workload.requests[:: len(workload.requests) // _SAMPLE + 1]
        services = sorted(
            (costs.prefill(new := round(one.prompt * share), one.prompt - new), fixed + each_token * one.prompt)
            for one in requests
        )
        self._service = moments([seconds for seconds, _ in services])
        self._alone = list(_thinned([sum(pair) for pair in services]))
        steps = [max(0.0, one.output - 1.0) for one in requests]
        self._steps = moments(steps)
        tokens = math.fsum((one.prompt + one.output / 2) * one.output for one in requests)
        self._resident = tokens / max(1.0, math.fsum(one.output for one in requests))
        self._first, self._each = costs.step(0.0, 0.0), costs.step(1.0, self._resident) - costs.step(0.0, 0.0)
        self._slots = max(1, min(machine.slots, int(machine.cache_tokens / max(1.0, self._resident))))

    def prefill_nodes(self) -> float:
        """That the prompts keep busy."""
        return self.workload.rate * self._service.mean

    def decode_nodes(self) -> float:
        """That the answers keep busy, with as many at once as a node has places for and the objective allows."""
        tpot = self._slo.tpot
        most = math.inf if tpot is None or not self._each else max(1.0, (tpot - self._first) / self._each)
        return self._nodes_with(min(self._slots, most))

    def _nodes_with(self, batch: float) -> float:
        """Decode nodes that are busy if each has so many at once."""
        return self.workload.rate * self._decode_service(batch) / batch

    def share(self, split: Split) -> float:
        """Of the requests, that are served within the objective. Both roles need a node."""
        ttft = self._slo.ttft
        return self._keeps_pace(split) * (1.0 if ttft is None else self._started(split)(ttft))

    def of(self, split: Split) -> Forecast:
        """All of it, which takes a hundred times as long."""
        started, share = self._started(split), self.share(split)
        p50, p90, p99 = (_quantile(started, q) for q in (0.5, 0.9, 0.99))
        tpot, _ = self._tpot(split)
        prefill, decode = self._prefill(split).load, self._decode(split).load
        return Forecast(split, p50, p90, p99, tpot, share, share * self.workload.rate, prefill, decode)

    def load(self, split: Split) -> float:
        """Work that comes over what the role that is the bottleneck can do, tokens no slower than the objective."""
        return max(self.prefill_nodes() / split.prefill, self.decode_nodes() / split.decode)

    def likely(self, splits: Iterable[Split]) -> list[Split]:
        """The `_LIKELY` of them with the least load at their bottleneck: the others serve less."""
        return sorted(splits, key=self.load)[:_LIKELY]

    def _started(self, split: Split) -> Callable[[float], float]:
        """The share of requests that have their first token within so many seconds."""
        prefill, decode = self._prefill(split), self._decode(split)

        def within(seconds: float) -> float:
            left = [seconds - alone for alone in self._alone]
            started = ((1.0 - prefill.longer_than(one)) * (1.0 - decode.longer_than(one)) for one in left)
            return math.fsum(started) / len(left)

        return within

    def _keeps_pace(self, split: Split) -> float:
        """The share of requests whose tokens come fast enough."""
        if self._slo.tpot is None:
            return 1.0
        tpot, spread = self._tpot(split)
        return 1.0 - normal_above((self._slo.tpot - tpot) / max(spread, 1e-9))

    def _prefill(self, split: Split) -> Waiting:
        load = self.prefill_nodes() / split.prefill
        service = self._service
        return Waiting(split.prefill, load, service.mean, self.workload.burstiness, service.variation, HORIZON)

    def _decode(self, split: Split) -> Waiting:
        load, places = self._nodes_with(self._slots) / split.decode, split.decode * self._slots
        service = self._decode_service(self._slots)
        return Waiting(places, load, service, self.workload.burstiness, self._steps.variation, HORIZON)

    def _decode_service(self, batch: float) -> float:
        """Seconds that a request has its place, in a batch of so many."""
        return self._hold + self._steps.mean * (self._first + self._each * batch)

    @property
    def _hold(self) -> float:
        return self._service.mean + math.fsum(self._machine.transfer[:1])

    def _tpot(self, split: Split) -> tuple[float, float]:
        """Mean and standard deviation over answers."""
        rate, steps, each = self.workload.rate / split.decode, self._steps.mean, self._each
        alone = self._first + each / split.decode
        left = 1.0 - rate * steps * each
        batch = rate * steps * alone / left if left > 0.0 else math.inf
        batch = min(batch, float(self._slots))
        step = min(alone + each * batch, self._first + each * self._slots)
        spread = batch / split.decode * step / alone * (1.0 + self.workload.burstiness) / 2.0 + _UNEVEN
        seen = alone / step  # an answer's time in units of that in which the batch forgets
        averaged = 2.0 * (seen - 1.0 + math.exp(-seen)) / seen**2
        most = (self._slots - batch) ** 2 + _UNEVEN  # no batch is larger than the places
        return step, each * math.sqrt(min(spread, most) * averaged)


def _thinned(ordered: Sequence[float]) -> Iterable[float]:
    """At most `_POINTS` of them: the middles of equal shares."""
    count = min(len(ordered), _POINTS)
    return (ordered[int((place + 0.5) * len(ordered) / count)] for place in range(count))


def _quantile(within: Callable[[float], float], q: float) -> float:
    low, high = 0.0, 2.0 * HORIZON
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if within(middle) >= q else (middle, high)
    return high
