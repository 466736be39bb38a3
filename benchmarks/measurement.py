"""What was seen of one request, and what follows from many. Pure; times are seconds of one steady clock."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.slo import Slo
from benchmarks.percentiles import Summary, summarise


@dataclass(slots=True)
class Measurement:
    """One request. `due` is when it was to be sent: under open load a late sender must not flatter the answer."""

    due: float
    asked_tokens: int
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (moment, tokens in this message)
    ended: float = 0.0
    usage_tokens: int | None = None  # completion tokens as the endpoint counts them
    error: str = ""  # "" for a request that ended well
    asked_prompt: int = 0  # tokens
    prompt_tokens: int = 0  # as the endpoint counts them, if it tells how many of them were cached
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.arrivals[0][0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first message; None when there was only one."""
        later = self.tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies as a reader feels them: between messages that brought tokens."""
        moments = [moment for moment, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(moments)]


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell of a benchmark. Rates are per second of `seconds`, from the first request due to the last one ended."""

    name: str
    seconds: float
    sent: int
    good: int  # ended well and within the SLO
    ended_well: int
    errors: dict[str, int]  # how many of each kind
    miscounted: int  # answers whose usage differs from the tokens received
    ttft: Summary | None
    tpot: Summary | None
    itl: Summary | None
    tokens_per_second: float
    requests_per_second: float
    goodput: float  # good requests per second
    cached_share: float | None  # of the prompt tokens, by the endpoint's word; None if it says nothing


def evaluate(name: str, measurements: Sequence[Measurement], slo: Slo) -> CellResult:
    """Errors are counted apart and are no part of any latency; they make their requests not good."""
    well = [one for one in measurements if not one.error and one.arrivals]
    errors: dict[str, int] = {}
    for one in measurements:
        if one.error or not one.arrivals:
            kind = one.error or "no tokens"
            errors[kind] = errors.get(kind, 0) + 1
    seconds = max((one.ended for one in measurements), default=0.0) - min(
        (one.due for one in measurements), default=0.0
    )
    per_second = 1 / seconds if seconds > 0 else 0.0
    prompt_tokens = sum(one.prompt_tokens for one in well)
    good = sum(slo.met(one.ttft, one.tpot) for one in well)
    return CellResult(
        name=name,
        seconds=seconds,
        sent=len(measurements),
        good=good,
        ended_well=len(well),
        errors=errors,
        miscounted=sum(one.usage_tokens not in (None, one.tokens) for one in well),
        ttft=summarise([one.ttft for one in well]),
        tpot=summarise([one.tpot for one in well if one.tpot is not None]),
        itl=summarise([gap for one in well for gap in one.gaps]),
        tokens_per_second=sum(one.tokens for one in well) * per_second,
        requests_per_second=len(well) * per_second,
        goodput=good * per_second,
        cached_share=sum(one.cached_tokens for one in well) / prompt_tokens if prompt_tokens else None,
    )
