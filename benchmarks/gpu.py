"""`gpu`: kernels, engine and servers on one NVIDIA GPU, as shares of what the GPU can do.

Sections: `limits` measures what the GPU reaches at one thing alone, in this run; `kernels`,
`engine` and `fp8` hold kernels and steps of the engine against these limits, in this process; and
`served` starts clusters with random weights, and vLLM where it is installed, and sends both the
same requests. Every section may take a part of --seconds. What one leaves over, the next ones get;
what has no time left is left out with a line. Progress goes to standard error.
"""

import argparse
import gc
import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from baton.config.resolve import parse_assignment, resolve_config
from benchmarks.clusters.llama_folders import LLAMA_CONFIGS, write_llama_folder
from benchmarks.device.section_run import MeasuredModel, SectionRun, TimeIsUp, allot_seconds
from benchmarks.figures.report import BenchmarkIncomplete, HardwareMissing, ResultRow, print_rows
from node_engine.model.config.model_config import load_model_config

HELP = "kernels, engine steps and served figures on a GPU, as shares of its limits; beside vLLM"
# Section -> its part of the time. The rates of the GPU are measured whatever is chosen.
SECTION_WEIGHTS = {"limits": 1.0, "kernels": 3.0, "engine": 7.0, "fp8": 5.0, "served": 12.0}
DEFAULT_SECONDS = 520.0
TABLE_ROWS = "128/128:1,8,32,64;2048/64:1,8"
_SAMPLED_CONCURRENCIES = (1, 32, 64)
_SERVED = "served"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_arguments(parser)
    _add_served_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="", help=f"sections, separated by commas: {','.join(SECTION_WEIGHTS)}"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=DEFAULT_SECONDS,
        help=f"of the whole run at most (default {DEFAULT_SECONDS:g})",
    )
    parser.add_argument(
        "--model",
        default="8b",
        help=f"{' or '.join(LLAMA_CONFIGS)}: the shape of a Llama, random weights; or a model"
        " folder (default 8b)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu is for --only served: it shows that the servers run (default cuda)",
    )


def _add_served_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows",
        default=TABLE_ROWS,
        help=f"of served: PROMPT/OUTPUT:CLIENTS,...;... in tokens (default {TABLE_ROWS})",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="of the rows of served at most, while there is time; medians count (default 3)",
    )
    parser.add_argument(
        "--served-1p1d", action="store_true", help="also one prefill and one decode node"
    )
    parser.add_argument(
        "--vllm",
        default="",
        metavar="PYTHON",
        help="interpreter that has vLLM (default: this one, if it has it)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the clusters that are started; may be repeated",
    )


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    """Run the chosen sections. Raises HardwareMissing, ValueError, and BenchmarkIncomplete."""
    names = choose_sections(options.only)
    require_hardware(options.device, names)
    with TemporaryDirectory(prefix="baton-bench-gpu-") as scratch:
        run = SectionRun(
            model=find_model(options.model, Path(scratch)),
            device=torch.device(options.device),
            console=console,
            command=command,
            weights={name: SECTION_WEIGHTS[name] for name in names},
            ends_at=time.perf_counter() + options.seconds,
        )
        sections = plan_sections(run, names, options)
        parts = allot_seconds(run.weights, options.seconds)
        plan = ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items())
        console.print(f"at most {options.seconds:.0f} s: {plan} s; progress on standard error")
        if run.device.type == "cuda":
            measure_rates(run, is_printed="limits" not in names)
        failed = [name for name, measure in sections.items() if not run_section(run, name, measure)]
    for note in run.notes:
        console.print(f"left out: {note}", markup=False)
    if failed:
        raise BenchmarkIncomplete(f"these sections failed: {', '.join(failed)}", run.rows)
    return run.rows


def choose_sections(only: str) -> list[str]:
    """Return the sections in their order. Raises ValueError for an unknown one."""
    wanted = [name for name in only.split(",") if name] or list(SECTION_WEIGHTS)
    if unknown := sorted(set(wanted) - SECTION_WEIGHTS.keys()):
        known = ", ".join(SECTION_WEIGHTS)
        raise ValueError(f"--only {','.join(unknown)}: the sections are {known}")
    return [name for name in SECTION_WEIGHTS if name in wanted]


def require_hardware(device: str, names: list[str]) -> None:
    """Raise HardwareMissing if the sections cannot run on this machine."""
    if device == "cpu":
        if names != [_SERVED]:
            raise HardwareMissing("--device cpu has no figures but those of --only served")
        return
    if not torch.cuda.is_available():
        raise HardwareMissing("benchmark gpu needs an NVIDIA GPU, and torch sees none here")
    if importlib.util.find_spec("triton") is None:
        raise HardwareMissing("benchmark gpu needs triton: pip install 'baton-serve[gpu]'")


def find_model(name: str, scratch: Path) -> MeasuredModel:
    """Return the named shape, written to `scratch`, or the model folder."""
    shape = LLAMA_CONFIGS.get(name)
    folder = Path(name) if shape is None else write_llama_folder(scratch / "model", shape)
    load_format = "auto" if list(folder.glob("*.safetensors")) else "dummy"
    return MeasuredModel(folder, load_model_config(folder), load_format)


def plan_sections(
    run: SectionRun, names: list[str], options: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """Return what runs each section. Raises ValueError or ConfigError for bad options."""
    from benchmarks.device import served, served_rows, served_systems

    rows = served_rows.parse_rows(options.rows, _SAMPLED_CONCURRENCIES)
    given = dict(map(parse_assignment, options.set))
    config = resolve_config(given, environ={})
    cases = served.make_cases(
        run,
        rows,
        has_1p1d=options.served_1p1d,
        vllm_python=served_systems.find_vllm(options.vllm) if options.device == "cuda" else "",
        rounds=options.rounds,
        overrides={key: getattr(config, key) for key in given},
    )
    modules = {
        "limits": "benchmarks.device.limits",
        "kernels": "benchmarks.device.kernel_shares",
        "engine": "benchmarks.device.engine_steps",
        "fp8": "benchmarks.device.fp8_gains",
    }  # imported when they run: they import triton

    def plan(name: str) -> Callable[[], None]:
        if name == _SERVED:
            return lambda: served.measure(run, cases)
        return lambda: importlib.import_module(modules[name]).measure(run)

    return {name: plan(name) for name in names}


def measure_rates(run: SectionRun, *, is_printed: bool) -> None:
    """Measure the rates to which all shares refer."""
    run.section = "limits"
    importlib.import_module("benchmarks.device.limits").measure_rates(run)
    if is_printed:
        print_rows(run.console, "gpu: limits", run.list_section_rows())


def run_section(run: SectionRun, name: str, measure: Callable[[], None]) -> bool:
    """Run one section within its time and print its figures; False if it failed."""
    run.begin_section(name)
    succeeded = True
    try:
        measure()
    except TimeIsUp:
        run.leave_out("the time of this section was up before its end")
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)
        run.leave_out(f"failed: {type(error).__name__}: {error}")
        succeeded = False
    _free_device_memory()
    if rows := run.list_section_rows():
        print_rows(run.console, f"gpu: {name}", rows)
    return succeeded


def _free_device_memory() -> None:
    """Give back what the section has allocated: servers are other processes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
