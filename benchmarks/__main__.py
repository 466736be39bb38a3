"""`python -m benchmarks`: measurements of a running system. `all` runs each with its defaults."""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

import grpc
from rich.console import Console

from baton.cli.common.errors import innermost_error
from baton.errors import BatonError
from benchmarks.figures.report import (
    BenchmarkIncomplete,
    HardwareMissing,
    ResultRow,
    reproducing_command,
    write_json,
)

# Each module has HELP, add_arguments(parser) and main(options, console, command) -> rows; it prints
# its own results. It raises HardwareMissing if this machine cannot run it.
BENCHMARK_MODULES = {
    "compare": "benchmarks.compare",
    "coordinator": "benchmarks.coordinator",
    "engine": "benchmarks.engine",
    "gpu": "benchmarks.gpu",
    "granularity": "benchmarks.granularity",
    "interference": "benchmarks.interference",
    "kernels": "benchmarks.kernels",
    "links": "benchmarks.links",
    "plane": "benchmarks.plane",
    "pool": "benchmarks.pool",
    "quality": "benchmarks.quality",
    "ratio": "benchmarks.ratio",
    "routing": "benchmarks.routing",
    "serve": "benchmarks.serve",
    "start": "benchmarks.start",
    "step": "benchmarks.step",
    "structured": "benchmarks.structured",
    "transfer": "benchmarks.transfer",
}
UNAVAILABLE_BENCHMARKS: tuple[str, ...] = ()
_WIDTH = 160  # columns


def main(arguments: list[str]) -> int:
    """Run the command line.

    Returns 0 if measured, 1 if not possible, 2 for wrong usage or missing hardware. `all` leaves
    out the benchmarks whose hardware is missing, with a line for each.
    """
    if arguments and arguments[0] in UNAVAILABLE_BENCHMARKS:
        sys.stderr.write(f"error: bench {arguments[0]} is not available in this version\n")
        return 1
    names = (
        arguments[:1] if set(arguments[:1]) & BENCHMARK_MODULES.keys() else list(BENCHMARK_MODULES)
    )  # a benchmark may import much
    modules = {name: importlib.import_module(BENCHMARK_MODULES[name]) for name in names}
    options = make_parser(modules).parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    rows: list[ResultRow] = []
    failure = ""
    try:
        for name in list(modules) if options.benchmark == "all" else [options.benchmark]:
            rows += _run_benchmark(modules[name], name, options, console)
    except HardwareMissing as missing:
        sys.stderr.write(f"error: {missing}\n")
        return 2
    except BenchmarkIncomplete as incomplete:
        rows += incomplete.rows
        failure = str(incomplete)
    except Exception as group:
        error = innermost_error(group)
        if not isinstance(error, BatonError | ValueError | TimeoutError | grpc.RpcError):
            raise
        failure = str(error) or "it took too long"
    if options.json and rows:
        write_json(options.json, rows)
    if failure:
        sys.stderr.write(f"error: {failure}\n")
    return int(bool(failure))


def _run_benchmark(
    module: ModuleType, name: str, options: argparse.Namespace, console: Console
) -> list[ResultRow]:
    is_one_of_all = options.benchmark == "all"
    if is_one_of_all:
        options = argparse.Namespace(
            **{**vars(make_parser({name: module}).parse_args([name])), "benchmark": name}
        )
        command = reproducing_command([name])
    else:
        command = reproducing_command(sys.argv[1:])
    try:
        rows: list[ResultRow] = module.main(options, console, command)
    except HardwareMissing as error:
        if not is_one_of_all:
            raise
        sys.stderr.write(f"SKIPPED {name}: {error}\n")
        return []
    return rows


def make_parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="|".join([*BENCHMARK_MODULES, "all"])
    )
    for name, module in modules.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # some docstrings contain lists
            allow_abbrev=False,
        )
        module.add_arguments(command)
        _add_json(command)
    _add_json(commands.add_parser("all", help="each with its defaults"))
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
