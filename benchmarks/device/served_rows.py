"""The rows of the served figures: what is sent, and how results are shown. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.device.step_bounds import StepBounds
from benchmarks.load.measurement import CellResult

_FEWEST_REQUESTS = 5
_MANY_CLIENTS = 8  # from so many on, each sends three requests, and two from 32 on
_CACHE_RESERVE = 1.5  # times the tokens that a row holds at once
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A closed loop of requests that all have the same lengths."""

    prompt_tokens: int
    output_tokens: int
    concurrency: int
    is_sampled: bool = False  # temperature 1 and top-p 0.9 instead of greedy

    @property
    def name(self) -> str:
        sampled = "_sampled" if self.is_sampled else ""
        return f"{self.prompt_tokens}_{self.output_tokens}_c{self.concurrency}{sampled}"

    @property
    def num_requests(self) -> int:
        """Requests of the row: several for each client, so that most steps have all of them."""
        waves = 3 if self.concurrency <= _MANY_CLIENTS else 2
        return max(_FEWEST_REQUESTS, waves * self.concurrency)


def parse_rows(text: str, sampled: Sequence[int]) -> list[ServedRow]:
    """Parse `128/128:1,8;2048/64:1`: prompt and output tokens, and concurrencies.

    Rows of the first lengths whose concurrency is in `sampled` are followed by the same row with
    sampling. Raises ValueError.
    """
    rows: list[ServedRow] = []
    for place, group in enumerate(text.split(";")):
        try:
            lengths, _, clients = group.partition(":")
            prompt, output = map(int, lengths.split("/"))
            concurrencies = [int(word) for word in clients.split(",")]
            if min(prompt, output, *concurrencies) < 1:
                raise ValueError
        except ValueError:
            raise ValueError(f"--rows {group!r} is not PROMPT/OUTPUT:CLIENTS,CLIENTS") from None
        for concurrency in concurrencies:
            rows.append(ServedRow(prompt, output, concurrency))
            if place == 0 and concurrency in sampled:
                rows.append(ServedRow(prompt, output, concurrency, is_sampled=True))
    return rows


def choose_cache_bytes(rows: Sequence[ServedRow], bounds: StepBounds) -> int:
    """Bytes of KV that hold all requests of the largest row at once, in whole GiB."""
    tokens = max(row.concurrency * (row.prompt_tokens + row.output_tokens) for row in rows)
    return math.ceil(_CACHE_RESERVE * tokens * bounds.kv_token_bytes / _GIB) * _GIB


def fit_together(systems: int, system_bytes: int, free_bytes: int) -> bool:
    """Whether so many servers can run on one device at the same time."""
    return systems * system_bytes <= free_bytes


@dataclass(frozen=True, slots=True)
class RowFigures:
    """One row on one system: medians over its rounds. Times are in seconds."""

    rounds: int
    ttft: float  # median of the requests of a round
    tpot: float  # likewise
    longest_gap: float  # between two tokens of any request of a round
    tokens_per_second: float
    errors: str  # what failed in all rounds; empty if nothing did

    @property
    def note(self) -> str:
        rounds = f"median of {self.rounds} rounds" if self.rounds > 1 else "one round"
        return f"{rounds}; {self.errors}" if self.errors else rounds


def combine_rounds(results: Sequence[CellResult]) -> RowFigures | None:
    """Return the figures of a row; None if no round has answers of several tokens."""
    ttfts = [result.ttft.p50 for result in results if result.ttft is not None]
    tpots = [result.tpot.p50 for result in results if result.tpot is not None]
    gaps = [result.itl.max for result in results if result.itl is not None]
    if not (ttfts and tpots and gaps):
        return None
    return RowFigures(
        rounds=len(results),
        ttft=statistics.median(ttfts),
        tpot=statistics.median(tpots),
        longest_gap=statistics.median(gaps),
        tokens_per_second=statistics.median(result.tokens_per_second for result in results),
        errors=describe_errors(results),
    )


def describe_errors(results: Sequence[CellResult]) -> str:
    """What failed in the rounds of a row; empty if nothing did."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.error_counts)
        counts["miscounted"] += result.miscounted_count
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()) if count)


def make_served_table(
    figures: Mapping[str, Mapping[ServedRow, RowFigures]], bounds: Mapping[ServedRow, float]
) -> Table:
    """One line for each row, one column for each system; `bounds` are in tokens per second."""
    title = "served: median TTFT / median TPOT in ms, output tokens per second"
    table = Table("row", title=title, title_justify="left", box=None, header_style="bold")
    table.add_column("bound", justify="right")
    for system in figures:
        table.add_column(system, justify="right", no_wrap=True)
    for row in dict.fromkeys(row for cells in figures.values() for row in cells):
        bound = f"{bounds[row]:,.0f}" if row in bounds else ""
        cells = [_format_cell(cells.get(row)) for cells in figures.values()]
        table.add_row(row.name, bound, *cells)
    return table


def _format_cell(figures: RowFigures | None) -> str:
    if figures is None:
        return "-"
    failed = f" ({figures.errors})" if figures.errors else ""
    latencies = f"{figures.ttft * 1e3:.1f} / {figures.tpot * 1e3:.2f}"
    return f"{latencies}, {figures.tokens_per_second:,.0f}{failed}"
