"""Options of `serve` that compare servers with each other, and the comparison."""

import argparse
import os
import secrets

from rich.console import Console

from benchmarks.cpu.rates import SIZES, MemoryReader
from benchmarks.cpu.shapes import MODEL_HELP, open_model
from benchmarks.figures.report import BenchmarkIncomplete, ResultRow
from benchmarks.peers.cells import DEFAULT_CELLS, parse_cells
from benchmarks.peers.report import make_tables, to_rows
from benchmarks.peers.rounds import PeerRounds, RoundSettings
from benchmarks.peers.systems import (
    BatonSystem,
    PeerSystem,
    attach_servers,
    parse_servers,
    plan_baton,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers beside each other, in interleaved rounds")
    group.add_argument(
        "--server", action="append", default=[], metavar="NAME=URL", help="one that runs"
    )
    group.add_argument(
        "--baton",
        action="append",
        default=[],
        metavar="[NAME=]LAYOUT[,SETTING=VALUE]",
        help="a cluster to start: colocated, 1p1d or auto, with settings of `baton up`",
    )
    group.add_argument(
        "--folder", default="small", help=f"what --baton serves: {MODEL_HELP} (default small)"
    )
    group.add_argument(
        "--of",
        action="append",
        default=[],
        metavar="NAME",
        help="a server that the others are divided by (default: every --server)",
    )
    group.add_argument(
        "--cells",
        default=DEFAULT_CELLS,
        help=f"WORKLOAD:CLIENTS,...;...: closed loops (default {DEFAULT_CELLS})",
    )
    group.add_argument("--rounds", type=int, default=3, help="medians of these count (3)")
    group.add_argument(
        "--max-foreign",
        type=float,
        default=0.1,
        help="cores that other processes may use, or the cell is repeated (0.1)",
    )
    group.add_argument("--attempts", type=int, default=3, help="of a cell that is disturbed (3)")
    group.add_argument(
        "--quiet", type=float, default=30.0, help="seconds to wait for a quiet machine (30)"
    )


async def compare_servers(
    options: argparse.Namespace, console: Console, command: str
) -> list[ResultRow]:
    """Measure all servers. Raises ValueError for bad options, BenchmarkIncomplete for failures."""
    cells, urls = parse_cells(options.cells), parse_servers(options.server)
    if min(options.rounds, options.attempts) < 1:
        raise ValueError("--rounds and --attempts must be 1 or more")
    seed = options.seed or secrets.token_hex(8)
    console.print(f"seed {seed}")
    with open_model(options.folder) as model, attach_servers(urls) as servers:
        clusters = [
            plan_baton(text, console, model.folder, model.load_format) for text in options.baton
        ]
        systems: list[PeerSystem] = [*servers, *clusters]
        names = [system.name for system in systems]
        peers = options.of or list(urls)
        if len(set(names)) < len(names) or not set(peers) <= set(names):
            raise ValueError(f"names must differ, and --of be one of {', '.join(names)}")
        memory = MemoryReader(len(os.sched_getaffinity(0)), SIZES.read_bytes)
        rounds = PeerRounds(_read_settings(options, seed), cells, console, memory)
        await rounds.measure_all(systems)
    return _conclude(rounds, clusters, peers, console, command)


def _conclude(
    rounds: PeerRounds,
    clusters: list[BatonSystem],
    peers: list[str],
    console: Console,
    command: str,
) -> list[ResultRow]:
    """Print the tables and return the rows. Raises BenchmarkIncomplete if requests failed."""
    results = rounds.collect()
    for table in make_tables(results, peers):
        console.print(table)
    starts = {cluster.name: cluster.start_seconds for cluster in clusters}
    rows = to_rows(results, peers, starts, command)
    failed = [
        f"{name} {cell.name}: {', '.join(f'{count} {kind}' for kind, count in errors.items())}"
        for name, figures in results.items()
        for cell, medians in figures.items()
        if (errors := medians.errors)
    ]
    failed += [f"no answers: {pair}" for pair in rounds.list_missing()]
    if failed:
        raise BenchmarkIncomplete("; ".join(failed), rows)
    return rows


def _read_settings(options: argparse.Namespace, seed: str) -> RoundSettings:
    return RoundSettings(
        rounds=options.rounds,
        max_foreign_cores=options.max_foreign,
        attempts=options.attempts,
        quiet_seconds=options.quiet,
        cell_seconds=options.seconds,
        request_seconds=options.timeout,
        vocabulary=options.vocabulary,
        seed=seed,
    )
