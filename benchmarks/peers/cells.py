"""What is sent to servers that are compared, and the figures of a cell. Pure; times in seconds."""

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load.measurement import RequestMeasurement
from benchmarks.load.request_plan import PlannedRequest

# Requests of each client. At the end of a cell fewer clients than its concurrency are left, which
# counts less the more requests there are. Cells of many clients have fewer, to end in time.
_WAVES, _WAVES_OF_MANY = 8, 5
_MANY_REQUESTS = 80  # of all clients
_LONGS_PER_CELL = 4  # at least, in a workload that has long prompts


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """Lengths of prompts and answers in tokens. Every `long_every`th request is a long one."""

    name: str
    prompt: int
    output: int
    long_every: int = 0  # 0: there are no long ones
    long_prompt: int = 0
    long_output: int = 0


WORKLOADS = {
    workload.name: workload
    for workload in (
        PeerWorkload("chat", 128, 64),
        PeerWorkload("mixed", 64, 64, long_every=8, long_prompt=2048, long_output=16),
    )
}
DEFAULT_CELLS = "chat:1,4,16;mixed:4"


@dataclass(frozen=True, slots=True)
class PeerCell:
    """A closed loop of one workload."""

    workload: PeerWorkload
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.workload.name}_c{self.concurrency}"

    @property
    def num_requests(self) -> int:
        return max(
            min(_WAVES * self.concurrency, _MANY_REQUESTS),
            _WAVES_OF_MANY * self.concurrency,
            _LONGS_PER_CELL * self.workload.long_every,
        )

    def plan(self, seed: str) -> list[PlannedRequest]:
        """Return the requests; their prompts depend on the seed."""
        draws = random.Random(f"{seed}/{self.name}")
        return [
            PlannedRequest(0.0, *self._lengths(number), draws.getrandbits(63), salt=seed)
            for number in range(1, self.num_requests + 1)
        ]

    def _lengths(self, number: int) -> tuple[int, int]:
        workload = self.workload
        if workload.long_every and number % workload.long_every == 0:
            return workload.long_prompt, workload.long_output
        return workload.prompt, workload.output


def parse_cells(text: str) -> list[PeerCell]:
    """Parse `chat:1,4,16;mixed:4`: workloads and the clients of their cells. Raises ValueError."""
    cells = []
    for group in text.split(";"):
        name, _, clients = group.partition(":")
        words = clients.split(",")
        if name not in WORKLOADS or not all(word.isdecimal() and int(word) for word in words):
            raise ValueError(f"--cells {group!r} is not {'|'.join(WORKLOADS)}:CLIENTS,CLIENTS")
        cells += [PeerCell(WORKLOADS[name], int(word)) for word in words]
    return cells


@dataclass(frozen=True, slots=True)
class CellFigures:
    """One cell on one server. All but throughput are of the requests with short prompts."""

    ttft: float  # median of the requests
    tpot: float  # likewise
    longest_gap: float  # between two tokens of any request
    tokens_per_second: float  # of all requests
    errors: Counter[str]  # failed requests, by kind


def evaluate_cell(cell: PeerCell, measurements: Sequence[RequestMeasurement]) -> CellFigures | None:
    """Return the figures of one round; None if no short request got two messages of tokens."""
    answered = [one for one in measurements if not one.error and one.token_arrivals]
    short = [
        one
        for one in answered
        if one.requested_prompt_tokens == cell.workload.prompt and len(one.token_arrivals) > 1
    ]
    if not short:
        return None
    begin = min(one.due_at for one in measurements)
    seconds = max(one.ended_at for one in measurements) - begin
    return CellFigures(
        ttft=statistics.median(one.ttft for one in short),
        tpot=statistics.median(map(_compute_tpot, short)),
        longest_gap=max(gap for one in short for gap in one.inter_token_gaps),
        tokens_per_second=sum(map(_count_tokens, answered)) / seconds,
        errors=Counter(
            one.error or "no tokens" for one in measurements if one.error or not one.token_arrivals
        ),
    )


def _count_tokens(measurement: RequestMeasurement) -> int:
    """Tokens as the server counts them: a message may bring several, or a part of one."""
    return measurement.usage_tokens or measurement.received_tokens


def _compute_tpot(measurement: RequestMeasurement) -> float:
    arrivals = measurement.token_arrivals
    return (arrivals[-1][0] - arrivals[0][0]) / max(1, _count_tokens(measurement) - 1)


@dataclass(frozen=True, slots=True)
class CellMedians:
    """The figures of a cell over its rounds."""

    rounds: Mapping[int, CellFigures]  # by the number of the round
    disturbed: int  # rounds that other processes disturbed in every attempt

    def median(self, figure: str) -> float:
        return statistics.median(self._list_values(figure))

    def spread(self, figure: str) -> tuple[float, float]:
        values = self._list_values(figure)
        return min(values), max(values)

    def median_ratio(self, other: "CellMedians", figure: str) -> float | None:
        """Return the median over the rounds of this server's figure divided by the other's.

        Both figures of a round were measured within minutes of each other. Rounds that only one
        server has do not count; None if they have none in common.
        """
        ratios = [
            getattr(self.rounds[number], figure) / getattr(other.rounds[number], figure)
            for number in self.rounds.keys() & other.rounds.keys()
        ]
        return statistics.median(ratios) if ratios else None

    def _list_values(self, figure: str) -> list[float]:
        return [getattr(one, figure) for one in self.rounds.values()]

    @property
    def errors(self) -> Counter[str]:
        return sum((one.errors for one in self.rounds.values()), Counter())
