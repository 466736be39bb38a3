"""What was seen of one request, and what follows from many. Pure; times are seconds of one steady
clock."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.slo import Slo
from benchmarks.figures.percentiles import PercentileSummary, summarize


@dataclass(slots=True)
class RequestMeasurement:
    """One request. `due_at` is when it was to be sent: under open load a late sender must not
    flatter the answer."""

    due_at: float
    requested_tokens: int
    token_arrivals: list[tuple[float, int]] = field(
        default_factory=list
    )  # (moment, tokens in this message)
    ended_at: float = 0.0
    usage_tokens: int | None = None  # completion tokens as the endpoint counts them
    error: str = ""  # "" for a request that ended well
    requested_prompt_tokens: int = 0  # tokens
    prompt_tokens: int = 0  # as the endpoint counts them, if it tells how many of them were cached
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
        """Inter-token latencies as a reader feels them: between messages that brought tokens."""
        moments = [moment for moment, _ in self.token_arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(moments)]


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell of a benchmark. Rates are per second of `seconds`, from the first request due to the
    last one ended."""

    name: str
    seconds: float
    sent_count: int
    good_count: int  # ended well and within the SLO
    succeeded_count: int
    error_counts: dict[str, int]  # how many of each kind
    miscounted_count: int  # answers whose usage differs from the tokens received
    ttft: PercentileSummary | None
    tpot: PercentileSummary | None
    itl: PercentileSummary | None
    tokens_per_second: float
    requests_per_second: float
    goodput: float  # good requests per second
    cached_share: (
        float | None
    )  # of the prompt tokens, by the endpoint's word; None if it says nothing


def evaluate_cell(name: str, measurements: Sequence[RequestMeasurement], slo: Slo) -> CellResult:
    """Errors are counted apart and are no part of any latency; they make their requests not
    good."""
    well = [one for one in measurements if not one.error and one.token_arrivals]
    errors: dict[str, int] = {}
    for one in measurements:
        if one.error or not one.token_arrivals:
            kind = one.error or "no tokens"
            errors[kind] = errors.get(kind, 0) + 1
    seconds = max((one.ended_at for one in measurements), default=0.0) - min(
        (one.due_at for one in measurements), default=0.0
    )
    per_second = 1 / seconds if seconds > 0 else 0.0
    prompt_tokens = sum(one.prompt_tokens for one in well)
    good = sum(slo.is_met(one.ttft, one.tpot) for one in well)
    return CellResult(
        name=name,
        seconds=seconds,
        sent_count=len(measurements),
        good_count=good,
        succeeded_count=len(well),
        error_counts=errors,
        miscounted_count=sum(one.usage_tokens not in (None, one.received_tokens) for one in well),
        ttft=summarize([one.ttft for one in well]),
        tpot=summarize([one.tpot for one in well if one.tpot is not None]),
        itl=summarize([gap for one in well for gap in one.inter_token_gaps]),
        tokens_per_second=sum(one.received_tokens for one in well) * per_second,
        requests_per_second=len(well) * per_second,
        goodput=good * per_second,
        cached_share=sum(one.cached_tokens for one in well) / prompt_tokens
        if prompt_tokens
        else None,
    )
