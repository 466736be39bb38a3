"""What was measured of each request, and the results of many. Pure; times are in seconds."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.slo import Slo
from benchmarks.figures.percentiles import PercentileSummary, summarize


@dataclass(slots=True)
class RequestMeasurement:
    """What was measured of one request; times are of one monotonic clock."""

    # When the request was to be sent. With open-loop load, latencies count from here, so that a
    # late sender does not improve them.
    due_at: float
    requested_tokens: int
    # (time, tokens in this message)
    token_arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended_at: float = 0.0
    usage_tokens: int | None = None  # completion tokens as the endpoint counts them
    error: str = ""  # empty: the request succeeded
    requested_prompt_tokens: int = 0
    prompt_tokens: int = 0  # as the endpoint counts them; 0 if it does not state cached tokens
    cached_tokens: int = 0

    @property
    def received_tokens(self) -> int:
        return sum(count for _, count in self.token_arrivals)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_arrivals[0][0] - self.due_at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first message; None when there was only one."""
        later = self.received_tokens - self.token_arrivals[0][1]
        return (
            (self.token_arrivals[-1][0] - self.token_arrivals[0][0]) / later if later > 0 else None
        )

    @property
    def inter_token_gaps(self) -> list[float]:
        """Inter-token latencies: the times between messages that brought tokens."""
        moments = [moment for moment, _ in self.token_arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(moments)]


@dataclass(frozen=True, slots=True)
class CellResult:
    """The results of one cell of a benchmark. Rates are per second of `seconds`."""

    name: str
    seconds: float  # from the first request due to the last one ended
    sent_count: int
    good_count: int  # succeeded within the SLO
    succeeded_count: int
    error_counts: dict[str, int]  # by kind
    miscounted_count: int  # answers whose usage differs from the tokens received
    ttft: PercentileSummary | None
    tpot: PercentileSummary | None
    itl: PercentileSummary | None
    tokens_per_second: float
    requests_per_second: float
    goodput: float  # good requests per second
    cached_share: float | None  # of the prompt tokens; None if the endpoint does not state it


def evaluate_cell(name: str, measurements: Sequence[RequestMeasurement], slo: Slo) -> CellResult:
    """Return the results of a cell.

    Failed requests are counted, do not enter any latency, and are not good.
    """
    succeeded = [
        measurement
        for measurement in measurements
        if not measurement.error and measurement.token_arrivals
    ]
    seconds = max((measurement.ended_at for measurement in measurements), default=0.0) - min(
        (measurement.due_at for measurement in measurements), default=0.0
    )
    per_second = 1 / seconds if seconds > 0 else 0.0
    prompt_tokens = sum(measurement.prompt_tokens for measurement in succeeded)
    good = sum(slo.is_met(measurement.ttft, measurement.tpot) for measurement in succeeded)
    return CellResult(
        name=name,
        seconds=seconds,
        sent_count=len(measurements),
        good_count=good,
        succeeded_count=len(succeeded),
        error_counts=_count_errors(measurements),
        miscounted_count=sum(
            measurement.usage_tokens not in (None, measurement.received_tokens)
            for measurement in succeeded
        ),
        ttft=summarize([measurement.ttft for measurement in succeeded]),
        tpot=summarize(
            [measurement.tpot for measurement in succeeded if measurement.tpot is not None]
        ),
        itl=summarize([gap for measurement in succeeded for gap in measurement.inter_token_gaps]),
        tokens_per_second=sum(measurement.received_tokens for measurement in succeeded)
        * per_second,
        requests_per_second=len(succeeded) * per_second,
        goodput=good * per_second,
        cached_share=sum(measurement.cached_tokens for measurement in succeeded) / prompt_tokens
        if prompt_tokens
        else None,
    )


def _count_errors(measurements: Sequence[RequestMeasurement]) -> dict[str, int]:
    """Failed requests by kind of error."""
    return Counter(
        measurement.error or "no tokens"
        for measurement in measurements
        if measurement.error or not measurement.token_arrivals
    )
