"""Measures the demand of clients, how well it was served, and how fast the queue drains.

`WorkloadMeter` measures demand and latencies over a window of time. Demand is measured from
arrivals, never from how busy a device is, since a device that decodes is always busy. So it does
not change when a node switches its role, and a controller that uses it does not react to its own
changes.

`OutputLengthPredictor` predicts output lengths from `max_tokens` and the share of it that earlier
outputs used. The share is an exponentially weighted mean for each tenant and each power of two of
`max_tokens`: requests for 16 tokens tend to use them all, and those that allow 4,096 do not.

`RecentWork` keeps exponentially decayed sums of recent work, by node or tenant, in seconds or
tokens. Work counts less by 1/e every `window` seconds. The sums use forward decay (Cormode,
Shkapenyuk, Srivastava, Xu, "Forward decay: a practical time decay model for streaming systems",
2009): instead of shrinking older work, newer work counts more. So sums can be compared as they are,
and no sum has to be updated as time passes.

`ServiceRate` measures how fast the queue drains, and predicts the wait of a new request. The rate
is measured while requests wait, so it is the rate of whatever is the bottleneck; in requests and in
prompt tokens. Measurements decay exponentially.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from baton.prediction_error import DECAY_OBSERVATIONS, MeanRelativeError
from baton.slo import Slo

HISTORY_SECONDS = 480.0  # seconds
MAX_EVENTS = 16384  # arrivals and ends
MAX_REJECTED_COPIES = 256  # copies of arrivals that stand for rejected requests
_BINS = 30  # intervals of a window in which arrivals are counted, for the burstiness
_COMPUTED_SHARE_MEMORY = 256  # prompts after which one counts 1/e
_BURSTINESS_RANGE = 0.25, 16.0  # between which the burstiness is believed


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Prompt and expected output length of one request, in tokens."""

    prompt_tokens: int
    output_tokens: float  # predicted


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """The demand in a window of time: rate, burstiness and sizes of requests."""

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
    """The latencies of one request that has ended."""

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

    # inputs

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

    # summaries

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
        )  # earlier arrivals were dropped
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


PRIOR_SHARE = 0.5
MAX_KEYS = 4096  # pairs of tenant and power, least recently used evicted


@dataclass(slots=True)
class _OutputShare:
    """The mean output length of one kind of requests, as a share of `max_tokens`."""

    mean: float = PRIOR_SHARE
    sample_count: int = 0

    def add_sample(self, share: float) -> None:
        self.sample_count += 1
        self.mean += (share - self.mean) / min(
            self.sample_count + 1, DECAY_OBSERVATIONS
        )  # the prior is one of them


class OutputLengthPredictor:
    """Predicts output lengths by tenant and magnitude of `max_tokens`."""

    def __init__(self) -> None:
        self.relative_error = MeanRelativeError()
        self._shares: OrderedDict[tuple[str, int], _OutputShare] = OrderedDict()

    def predict_tokens(self, who: str, max_tokens: int) -> float:
        """Return the predicted tokens, from 1 to `max_tokens`."""
        known = self._shares.get((who, max_tokens.bit_length()))
        return max(1.0, (known.mean if known else PRIOR_SHARE) * max_tokens)

    def record_output(self, who: str, max_tokens: int, tokens: int) -> None:
        """Record a complete output."""
        self.relative_error.add_prediction(self.predict_tokens(who, max_tokens), tokens)
        kind = (who, max_tokens.bit_length())
        self._shares.setdefault(kind, _OutputShare()).add_sample(tokens / max_tokens)
        self._shares.move_to_end(kind)
        if len(self._shares) > MAX_KEYS:
            self._shares.popitem(last=False)


WINDOW_SECONDS = 30.0  # seconds
_MAX_WINDOWS = 200.0  # after which sums are rescaled, long before floats overflow


class RecentWork:
    """Exponentially decayed sums of work, by node or tenant."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self._window = window
        self._landmark = -math.inf  # when a second of work counts 1
        self._sums: dict[str, float] = {}
        self._total = 0.0

    @property
    def total_work(self) -> float:
        return self._total

    def rescale(self, now: float) -> bool:
        """Must be called first at each moment; return whether all sums were rescaled."""
        windows = (now - self._landmark) / self._window
        if windows <= _MAX_WINDOWS:
            return False
        self._sums = {name: work * math.exp(-windows) for name, work in self._sums.items()}
        self._total = sum(self._sums.values())
        self._landmark = now
        return True

    def work_unit(self, now: float) -> float:
        """Return what a unit of work given now adds to a sum."""
        return math.exp((now - self._landmark) / self._window)

    def get_work(self, name: str) -> float:
        return self._sums.get(name, 0.0)

    def add_work(self, name: str, work: float, now: float) -> None:
        added = work * self.work_unit(now)
        self._sums[name] = self._sums.get(name, 0.0) + added
        self._total += added

    def remove_key(self, name: str) -> None:
        self._total -= self._sums.pop(name, 0.0)
        if not self._sums:
            self._total = 0.0  # and no error of rounding is left


DECAY_SECONDS = 10.0  # after which a measurement counts 1/e
_MIN_PLACEMENTS = 4.0  # placements, by weight, that make a measurement


@dataclass(frozen=True, slots=True)
class BacklogAhead:
    """The waiting work that would be served before a new request."""

    prompt_tokens: float
    requests: float
    # no decode node has a free slot, so a request must also wait for others to end
    is_decode_full: bool


class ServiceRate:
    """Predicts waits as the backlog ahead over the rate at which the queue drained recently."""

    def __init__(self) -> None:
        self._tokens = self._requests = self._seconds = 0.0
        self._backlog_since: float | None = None  # of the present backlog
        self._last_placement_at = 0.0

    def start_backlog(self, now: float) -> None:
        """A request waits. Idempotent."""
        if self._backlog_since is None:
            self._backlog_since = self._last_placement_at = now

    def end_backlog(self) -> None:
        """No request waits any more: the time from here on is not measured."""
        self._backlog_since = None

    def record_placement(self, tokens: int, now: float) -> None:
        """Record that a request was placed. Placements at the moment when the backlog begins are
        ignored: they filled room that was free."""
        if self._backlog_since is None or now <= self._backlog_since:
            return
        passed = now - self._last_placement_at
        faded = math.exp(-passed / DECAY_SECONDS)
        self._tokens = self._tokens * faded + tokens
        self._requests = self._requests * faded + 1.0
        self._seconds = self._seconds * faded + passed
        self._last_placement_at = now

    @property
    def requests_per_second(self) -> float | None:
        """None while too little was measured."""
        return self._requests / self._seconds if self._is_known else None

    def predict_wait_seconds(self, ahead: BacklogAhead) -> float:
        """Return the predicted wait in seconds; 0 while too little was measured."""
        if not self._is_known:
            return 0.0
        by_tokens = ahead.prompt_tokens * self._seconds / max(self._tokens, 1.0)
        by_requests = (
            ahead.requests * self._seconds / self._requests if ahead.is_decode_full else 0.0
        )
        return max(by_tokens, by_requests)

    @property
    def _is_known(self) -> bool:
        return self._requests >= _MIN_PLACEMENTS and self._seconds > 0.0
