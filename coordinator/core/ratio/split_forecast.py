"""Forecasts the TTFT, TPOT and goodput of a workload on a split, by a queueing model.

It answers what a split will do if the load stays as it was measured, also for a load that no split
has served yet. What a split would have done with the requests that arrived is answered by
`backtest`.

Prefill nodes are the servers of one queue (`queueing`); a prompt takes what the cost model
predicts. A decode node with a batch of n takes `fixed + each n` seconds for a step. By Little's law
the batch is what arrives while a request is there:

    n = rate / nodes  output (fixed + each (n + 1 / nodes))

because placement keeps batches equal; requests whose prompts are being computed also hold slots.
The variance of the batch is that of a linear noise approximation around n (van Kampen, "Stochastic
Processes in Physics and Chemistry", 1981, X), and what one request sees of it is its average over
the request's time. Slots of decode nodes are a second queue; a request that needs both waits for
the scarcer one.

The split in which decode nodes compute all prompts is not forecast.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.role_split import RoleSplit
from baton.slo import Slo
from coordinator.core.estimates.cost_model import NodeCosts
from coordinator.core.estimates.workload import WorkloadSummary, compute_moments
from coordinator.core.ratio.queueing import MultiServerQueue, normal_tail

HORIZON_SECONDS = 60.0  # for which the workload is assumed to last: bounds how far a backlog grows
_MAX_TTFT_POINTS = 32  # prompts that represent all of them
_BISECTIONS = 24
_MAX_CANDIDATES = 16  # splits that are evaluated in full
_MAX_SAMPLES = 1024  # requests
# of batches that placement keeps equal up to whole sequences
_BATCH_IMBALANCE_VARIANCE = 0.25


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One node, as all nodes are assumed to be."""

    node_costs: NodeCosts
    max_num_seqs: int  # sequences at once
    cache_tokens: int  # tokens that its cache holds
    # exposed seconds of a hand-off: fixed, and for each token
    transfer_costs: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SplitForecast:
    """The forecast of one split; times in seconds."""

    split: RoleSplit
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_mean: float
    slo_attainment: float  # share of requests within the SLO
    goodput: float  # requests a second within the SLO
    prefill_load: float  # work that arrives over what the role's nodes can do; likewise for decode
    decode_load: float

    @property
    def bottleneck_load(self) -> float:
        """Load of the role that is the bottleneck."""
        return max(self.prefill_load, self.decode_load)


class SplitForecaster:
    """Forecasts of one workload on nodes of one profile."""

    def __init__(self, workload: WorkloadSummary, profile: NodeProfile, slo: Slo) -> None:
        self.workload = workload
        self._slo = slo
        self._profile = profile
        fixed, seconds_per_token = profile.transfer_costs
        costs, share = profile.node_costs, workload.computed_share
        requests = workload.requests[:: len(workload.requests) // _MAX_SAMPLES + 1]
        services = sorted(
            (
                costs.prefill_seconds(
                    new := round(one.prompt_tokens * share), one.prompt_tokens - new
                ),
                fixed + seconds_per_token * one.prompt_tokens,
            )
            for one in requests
        )
        self._prefill_moments = compute_moments([seconds for seconds, _ in services])
        self._unqueued_ttfts = list(_sample_evenly([sum(pair) for pair in services]))
        steps = [max(0.0, one.output_tokens - 1.0) for one in requests]
        self._decode_step_moments = compute_moments(steps)
        tokens = math.fsum(
            (one.prompt_tokens + one.output_tokens / 2) * one.output_tokens for one in requests
        )
        self._mean_resident_tokens = tokens / max(
            1.0, math.fsum(one.output_tokens for one in requests)
        )
        self._fixed_step_seconds, self._step_seconds_per_sequence = (
            costs.step_seconds(0.0, 0.0),
            costs.step_seconds(1.0, self._mean_resident_tokens) - costs.step_seconds(0.0, 0.0),
        )
        self._max_batch = max(
            1,
            min(
                profile.max_num_seqs,
                int(profile.cache_tokens / max(1.0, self._mean_resident_tokens)),
            ),
        )

    def busy_prefill_nodes(self) -> float:
        """Return how many prefill nodes the prompts keep busy."""
        return self.workload.requests_per_second * self._prefill_moments.mean

    def busy_decode_nodes(self) -> float:
        """Return how many decode nodes the outputs keep busy, with batches as large as slots and
        the SLO allow."""
        tpot = self._slo.tpot_seconds
        most = (
            math.inf
            if tpot is None or not self._step_seconds_per_sequence
            else max(1.0, (tpot - self._fixed_step_seconds) / self._step_seconds_per_sequence)
        )
        return self._busy_decode_nodes_at(min(self._max_batch, most))

    def _busy_decode_nodes_at(self, batch: float) -> float:
        """Return how many decode nodes are busy with batches of this size."""
        return self.workload.requests_per_second * self._slot_seconds(batch) / batch

    def compute_attainment(self, split: RoleSplit) -> float:
        """Return the predicted SLO attainment. Both roles need a node."""
        ttft = self._slo.ttft_seconds
        return self._tpot_attainment(split) * (
            1.0 if ttft is None else self._ttft_distribution(split)(ttft)
        )

    def forecast_split(self, split: RoleSplit) -> SplitForecast:
        """Return the full forecast, which takes a hundred times as long."""
        within, share = self._ttft_distribution(split), self.compute_attainment(split)
        p50, p90, p99 = (_invert_distribution(within, q) for q in (0.5, 0.9, 0.99))
        tpot, _ = self._tpot_mean_and_stddev(split)
        prefill, decode = self._prefill_queue(split).load, self._decode_queue(split).load
        return SplitForecast(
            split,
            p50,
            p90,
            p99,
            tpot,
            share,
            share * self.workload.requests_per_second,
            prefill,
            decode,
        )

    def compute_bottleneck_load(self, split: RoleSplit) -> float:
        """Return the load of the bottleneck role, at a TPOT within the SLO."""
        return max(
            self.busy_prefill_nodes() / split.prefill_nodes,
            self.busy_decode_nodes() / split.decode_nodes,
        )

    def list_least_loaded(self, splits: Iterable[RoleSplit]) -> list[RoleSplit]:
        """Return the `_MAX_CANDIDATES` splits with the least loaded bottleneck."""
        return sorted(splits, key=self.compute_bottleneck_load)[:_MAX_CANDIDATES]

    def _ttft_distribution(self, split: RoleSplit) -> Callable[[float], float]:
        """Return the distribution function of the TTFT."""
        prefill, decode = self._prefill_queue(split), self._decode_queue(split)

        def within(seconds: float) -> float:
            left = [seconds - alone for alone in self._unqueued_ttfts]
            within = (
                (1.0 - prefill.wait_tail(one)) * (1.0 - decode.wait_tail(one)) for one in left
            )
            return math.fsum(within) / len(left)

        return within

    def _tpot_attainment(self, split: RoleSplit) -> float:
        """Return the share of requests whose TPOT is within the SLO."""
        if self._slo.tpot_seconds is None:
            return 1.0
        tpot, spread = self._tpot_mean_and_stddev(split)
        return 1.0 - normal_tail((self._slo.tpot_seconds - tpot) / max(spread, 1e-9))

    def _prefill_queue(self, split: RoleSplit) -> MultiServerQueue:
        load = self.busy_prefill_nodes() / split.prefill_nodes
        service = self._prefill_moments
        return MultiServerQueue(
            split.prefill_nodes,
            load,
            service.mean,
            self.workload.burstiness,
            service.squared_cv,
            HORIZON_SECONDS,
        )

    def _decode_queue(self, split: RoleSplit) -> MultiServerQueue:
        load, places = (
            self._busy_decode_nodes_at(self._max_batch) / split.decode_nodes,
            split.decode_nodes * self._max_batch,
        )
        service = self._slot_seconds(self._max_batch)
        return MultiServerQueue(
            places,
            load,
            service,
            self.workload.burstiness,
            self._decode_step_moments.squared_cv,
            HORIZON_SECONDS,
        )

    def _slot_seconds(self, batch: float) -> float:
        """Return the seconds that a request holds its slot, in a batch of this size."""
        return self._prefill_slot_seconds + self._decode_step_moments.mean * (
            self._fixed_step_seconds + self._step_seconds_per_sequence * batch
        )

    @property
    def _prefill_slot_seconds(self) -> float:
        return self._prefill_moments.mean + math.fsum(self._profile.transfer_costs[:1])

    def _tpot_mean_and_stddev(self, split: RoleSplit) -> tuple[float, float]:
        """Return mean and standard deviation of the TPOT over requests."""
        rate, steps, each = (
            self.workload.requests_per_second / split.decode_nodes,
            self._decode_step_moments.mean,
            self._step_seconds_per_sequence,
        )
        alone = self._fixed_step_seconds + each / split.decode_nodes
        left = 1.0 - rate * steps * each
        batch = rate * steps * alone / left if left > 0.0 else math.inf
        batch = min(batch, float(self._max_batch))
        step = min(alone + each * batch, self._fixed_step_seconds + each * self._max_batch)
        spread = (
            batch / split.decode_nodes * step / alone * (1.0 + self.workload.burstiness) / 2.0
            + _BATCH_IMBALANCE_VARIANCE
        )
        seen = alone / step  # an answer's time in units of that in which the batch forgets
        averaged = 2.0 * (seen - 1.0 + math.exp(-seen)) / seen**2
        most = (
            self._max_batch - batch
        ) ** 2 + _BATCH_IMBALANCE_VARIANCE  # no batch is larger than the places
        return step, each * math.sqrt(min(spread, most) * averaged)


def _sample_evenly(ordered: Sequence[float]) -> Iterable[float]:
    """Yield at most `_MAX_TTFT_POINTS` of the values: the middles of equal shares."""
    count = min(len(ordered), _MAX_TTFT_POINTS)
    return (ordered[int((place + 0.5) * len(ordered) / count)] for place in range(count))


def _invert_distribution(within: Callable[[float], float], q: float) -> float:
    low, high = 0.0, 2.0 * HORIZON_SECONDS
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if within(middle) >= q else (middle, high)
    return high
