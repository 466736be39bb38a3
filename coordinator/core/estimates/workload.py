"""Measures the demand of clients and how well it was served, over a window of time.

Demand is measured from arrivals, never from how busy a device is, since a device that decodes is
always busy. So it does not change when a node switches its role, and a controller that uses it does
not react to its own changes.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.slo import Slo

HISTORY_SECONDS = 480.0  # seconds
MAX_EVENTS = 16384  # arrivals and ends
MAX_REJECTED_COPIES = 256  # that stand for refused ones
_BINS = 30  # of a window, in which arrivals are counted
_COMPUTED_SHARE_MEMORY = 256  # prompts after which one counts 1/e
_BURSTINESS_RANGE = 0.25, 16.0  # between which the burstiness is believed


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The size of one request."""

    prompt_tokens: int
    output_tokens: float  # predicted


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """The demand of a window."""

    window_seconds: float
    requests_per_second: float
    burstiness: float  # variance over mean of arrival counts; 1 for a Poisson process
    requests: Sequence[RequestShape]  # those that were admitted
    computed_share: float = 1.0  # share of prompt tokens that no cache had

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens to be computed a second."""
        return self.requests_per_second * self.prompt_moments.mean * self.computed_share

    @property
    def decode_tokens_per_second(self) -> float:
        """Output tokens to be generated a second."""
        return self.requests_per_second * self.output_moments.mean

    @property
    def prompt_moments(self) -> "SampleMoments":
        return compute_moments([float(one.prompt_tokens) for one in self.requests])

    @property
    def output_moments(self) -> "SampleMoments":
        return compute_moments([one.output_tokens for one in self.requests])


@dataclass(frozen=True, slots=True)
class SampleMoments:
    """Mean and standard deviation of a sample."""

    mean: float
    stddev: float

    @property
    def squared_cv(self) -> float:
        """The squared coefficient of variation."""
        return (self.stddev / self.mean) ** 2 if self.mean else 0.0


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Mean seconds of each stage over a window; prefill and transfer as far as exposed."""

    queue: float = 0.0  # in the coordinator
    reserve: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class SloResults:
    """How many of the requests that ended in a window met the SLO."""

    ended_requests: int
    good_requests: int

    @property
    def attainment(self) -> float | None:
        return self.good_requests / self.ended_requests if self.ended_requests else None


@dataclass(frozen=True, slots=True)
class _EndedRequest:
    ended_at: float
    ttft: float  # infinite if it failed
    tpot: float | None
    stages: StageSeconds


class WorkloadMeter:
    """Records arrivals and ends, and summarizes them."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, RequestShape]] = deque(maxlen=MAX_EVENTS)
        self._refused: deque[tuple[int, int]] = deque(
            maxlen=int(HISTORY_SECONDS)
        )  # second, how many
        self._ends: deque[_EndedRequest] = deque(maxlen=MAX_EVENTS)
        self._started_at: float | None = None
        self._computed_share = 1.0

    # what happens

    def record_arrival(self, prompt: int, output: float, now: float) -> None:
        self._started_at = now if self._started_at is None else self._started_at
        self._arrivals.append((now, RequestShape(prompt, output)))
        while self._arrivals[0][0] <= now - HISTORY_SECONDS:
            self._arrivals.popleft()

    def record_rejection(self, now: float) -> None:
        """Count a request that was rejected for lack of room. Only numbers are kept, because there
        may be very many; such requests are assumed to be like the others."""
        second, count = int(now), 0
        if self._refused and self._refused[-1][0] == second:
            _, count = self._refused.pop()
        self._refused.append((second, count + 1))

    def record_prefill(self, computed: int, cached: int) -> None:
        """Record the tokens of a prompt that were computed and cached."""
        if computed + cached > 0:
            self._computed_share += (
                computed / (computed + cached) - self._computed_share
            ) / _COMPUTED_SHARE_MEMORY

    def record_end(
        self, ttft: float | None, tpot: float | None, stages: StageSeconds, now: float
    ) -> None:
        """Record latencies in seconds; `ttft` is None for a request that failed."""
        self._ends.append(_EndedRequest(now, math.inf if ttft is None else ttft, tpot, stages))
        while self._ends[0].ended_at <= now - HISTORY_SECONDS:
            self._ends.popleft()

    # what it comes to

    def summarize_workload(
        self, seconds: float, now: float, waiting: Sequence[tuple[float, RequestShape]] = ()
    ) -> WorkloadSummary | None:
        """Summarize the last `seconds`, or as many as there are; None without arrivals. Requests of
        `waiting` that arrived earlier are included, because they are still to be served."""
        recent = [(at, one) for at, one in self._arrivals if at > now - seconds]
        left = [one for at, one in waiting if at <= now - seconds]
        if not recent or self._started_at is None:
            return None
        since = (
            self._arrivals[0][0] if len(self._arrivals) == MAX_EVENTS else self._started_at
        )  # nobody before that is known
        begin = max(since, now - seconds)
        span = max(now - begin, 1e-3)
        rate = (len(recent) + len(left) + self._count_rejected_since(now - seconds)) / span
        bursts = _burstiness([at - begin for at, _ in recent], span)
        return WorkloadSummary(
            span, rate, bursts, [one for _, one in recent] + left, self._computed_share
        )

    @property
    def computed_share(self) -> float:
        """Share of prompt tokens that no cache had."""
        return self._computed_share

    def list_arrivals_since(self, moment: float) -> list[tuple[float, RequestShape]]:
        """Return later arrivals with their times. Rejected requests are represented by copies."""
        arrived: list[tuple[float, RequestShape]] = []
        for at, one in reversed(self._arrivals):
            if at <= moment:
                break
            arrived.append((at, one))
        arrived.reverse()
        refused = self._count_rejected_since(moment + 1.0) if arrived else 0
        copies = (
            arrived[number % len(arrived)] for number in range(min(refused, MAX_REJECTED_COPIES))
        )
        return sorted([*arrived, *copies], key=lambda pair: pair[0]) if refused else arrived

    def compute_slo_results(self, slo: Slo, seconds: float, now: float) -> SloResults:
        ended = good = 0
        for end in self._recent_ends(seconds, now):
            ended += 1
            good += slo.is_met(end.ttft, end.tpot) and end.ttft < math.inf
        return SloResults(ended + self._count_rejected_since(now - seconds), good)

    def compute_mean_stages(self, seconds: float, now: float) -> StageSeconds:
        """Return the mean stages of requests that were served."""
        served = [end.stages for end in self._recent_ends(seconds, now) if end.ttft < math.inf] or [
            StageSeconds()
        ]
        return StageSeconds(
            *(
                math.fsum(getattr(one, name) for one in served) / len(served)
                for name in StageSeconds.__slots__
            )
        )

    def _recent_ends(self, seconds: float, now: float) -> Iterator[_EndedRequest]:
        """Iterate over recent ends, newest first."""
        return takewhile(lambda end: end.ended_at > now - seconds, reversed(self._ends))

    def _count_rejected_since(self, moment: float) -> int:
        return sum(count for second, count in self._refused if second >= moment)


def compute_moments(values: Sequence[float]) -> SampleMoments:
    if not values:
        return SampleMoments(0.0, 0.0)
    mean = math.fsum(values) / len(values)
    return SampleMoments(
        mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    )


def _burstiness(arrivals: Sequence[float], span: float) -> float:
    counts = [0.0] * _BINS
    for at in arrivals:
        counts[min(_BINS - 1, int(at / span * _BINS))] += 1.0
    found = compute_moments(counts)
    return min(max(found.stddev**2 / found.mean, _BURSTINESS_RANGE[0]), _BURSTINESS_RANGE[1])
