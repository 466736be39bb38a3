"""Rows and a table of servers that were compared. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.table import Table

from benchmarks.figures.report import ResultRow, make_row
from benchmarks.peers.cells import CellMedians, PeerCell

Results = Mapping[str, Mapping[PeerCell, CellMedians]]  # system -> cell -> medians

_LATENCIES = ("ttft", "tpot", "longest_gap")
_TOKENS = ("tokens", "tokens_per_second")  # in names of rows, and of the figure
_COMPARED = (*((name, name) for name in _LATENCIES), _TOKENS)


def to_rows(
    results: Results,
    peers: Sequence[str],
    starts: Mapping[str, Sequence[float]],
    command: str,
) -> list[ResultRow]:
    """Return the figures of each system, its ratios to each peer, and the seconds of its start."""
    rows = []
    for name, seconds in starts.items():
        if seconds:
            note = f"until it serves; least of {len(seconds)}"
            rows.append(make_row(f"serve/{name}/start", min(seconds), "s", command, note=note))
    for name, cells in results.items():
        for cell, medians in cells.items():
            rows += _figure_rows(f"serve/{name}/{cell.name}", medians, command)
    for name in results:
        for peer in peers:
            rows += _ratio_rows(results, name, peer, command)
    return rows


def _figure_rows(prefix: str, medians: CellMedians, command: str) -> Iterator[ResultRow]:
    for figure in _LATENCIES:
        note = _describe_rounds(medians, figure, 1e3)
        value = medians.median(figure) * 1e3
        yield make_row(f"{prefix}/{figure}", value, "ms", command, note=note)
    name, figure = _TOKENS
    note = _describe_rounds(medians, figure, 1.0)
    yield make_row(f"{prefix}/{name}", medians.median(figure), "tokens/s", command, note=note)


def _describe_rounds(medians: CellMedians, figure: str, scale: float) -> str:
    low, high = medians.spread(figure)
    words = [f"{len(medians.rounds)} rounds, {low * scale:,.4g} to {high * scale:,.4g}"]
    if medians.disturbed:
        words.append(f"{medians.disturbed} of them disturbed")
    words += [f"{count} {kind}" for kind, count in sorted(medians.errors.items())]
    return "; ".join(words)


def _ratio_rows(results: Results, name: str, peer: str, command: str) -> Iterator[ResultRow]:
    """Yield each figure of a system divided by the peer's. Of latencies, less is better."""
    if name == peer or peer not in results:
        return
    for cell, medians in results[name].items():
        if (other := results[peer].get(cell)) is None:
            continue
        for row, figure in _COMPARED:
            if (ratio := medians.median_ratio(other, figure)) is not None:
                yield make_row(f"serve/{name}/{cell.name}/{row}_of_{peer}", ratio, "x", command)


def make_tables(results: Results, peers: Iterable[str]) -> Iterator[Table]:
    """Yield one table for each cell: a line for each system, ratios to the peers at its end."""
    peers = [peer for peer in peers if peer in results]
    for cell in dict.fromkeys(cell for cells in results.values() for cell in cells):
        table = Table("server", title=cell.name, title_justify="left", box=None)
        headings = ["TTFT ms", "TPOT ms", "longest gap ms", "tokens/s"]
        for heading in (*headings, *(f"tokens, gap of {peer}" for peer in peers)):
            table.add_column(heading, justify="right")
        for name, cells in results.items():
            if (medians := cells.get(cell)) is not None:
                latencies = [f"{medians.median(figure) * 1e3:,.1f}" for figure in _LATENCIES]
                rate = f"{medians.median(_TOKENS[1]):,.1f}"
                ratios = [_format_ratios(medians, results[peer].get(cell)) for peer in peers]
                table.add_row(name, *latencies, rate, *ratios)
        yield table


def _format_ratios(medians: CellMedians, peer: CellMedians | None) -> str:
    if peer is None or medians is peer:
        return ""
    tokens = medians.median_ratio(peer, _TOKENS[1])
    gap = medians.median_ratio(peer, "longest_gap")
    return "" if tokens is None or gap is None else f"{tokens:.2f}, {gap:.3f}"
