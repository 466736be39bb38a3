"""`engine`: how fast a CPU computes a model, as shares of what its cores can do.

The run also measures the cores at one thing alone: reading memory in two streams each, and matrix
products by torch. The least time of a step is the greater of its bytes at the read rate and its
operations at the rate of products; the share of a step is this least time over its own. Decode
steps read the weights and the KV of their sequences; a prefill step computes a whole prompt.

What memory gives differs from one second to the next on a machine that others use, so that the read
rate is measured before and after every few steps, one pass at a time, and these steps are compared
with the mean of both. The share of a case is the median of such shares.

Native kernels stand beside torch's, int8 beside the model's own dtype, and compact weights, which
nodes have by default, beside others; their least time is that of the bytes that they take. Each is
an engine in a process of its own, with the environment of a node. Rates and engines take turns in
every round, so that other load affects all of them; figures are medians of all rounds.
"""

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

from rich.console import Console

from baton.models.model_identity import UNQUANTIZED
from benchmarks.cpu import engine_worker as worker
from benchmarks.cpu.engine_worker import DecodeCase, EngineCase, EngineVariant, PrefillCase
from benchmarks.cpu.rates import SIZES, CpuRates, RateSizes, describe_reading
from benchmarks.cpu.shapes import MODEL_HELP, open_model
from benchmarks.device.section_run import MeasuredModel
from benchmarks.device.step_bounds import StepBounds, StepRates
from benchmarks.figures.report import ResultRow, make_row, make_time_row, print_rows

HELP = "decode and prefill steps on a CPU, as shares of its rates of reading and of products"
_CACHE_RESERVE = 1.5  # times the tokens that the largest case holds
_UNITS = {"bfloat16": "GFLOP/s", "float32": "GFLOP/s", "int8": "GOP/s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="small", help=f"{MODEL_HELP} (default small)")
    parser.add_argument(
        "--threads", type=int, default=0, help="compute threads (default: one for each core)"
    )
    parser.add_argument(
        "--cpu-kernels", default="", help="of native,torch (default: those that this CPU runs)"
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="LIBRARY",
        help="another build of the native kernels, measured beside the installed one",
    )
    parser.add_argument(
        "--quantize", default="none", help="of none,int8: one engine for each (default none)"
    )
    parser.add_argument("--batches", default="1,4,8,16", help="of decode steps (default 1,4,8,16)")
    parser.add_argument(
        "--context", type=int, default=160, help="tokens of each sequence that decodes (160)"
    )
    parser.add_argument(
        "--prompts", default="512,2048", help="tokens of prefill steps (default 512,2048)"
    )
    parser.add_argument("--steps", type=int, default=16, help="decode steps in a round (16)")
    parser.add_argument("--rounds", type=int, default=5, help="medians of these count (5)")


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a few steps took, and what the machine gave meanwhile."""

    seconds: float  # median of the steps
    rates: CpuRates

    def find_share(self, find_least: Callable[[StepRates], float], precision: str) -> float:
        return find_least(self.rates.of_steps(precision)) / self.seconds


@dataclass
class EngineRounds:
    """What was measured so far: the samples of all variants in the same order."""

    samples: dict[tuple[EngineVariant, EngineCase], list[StepSample]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def median_rates(self) -> CpuRates:
        rates = [sample.rates for samples in self.samples.values() for sample in samples]
        return CpuRates(
            statistics.median(rate.read_bytes for rate in rates),
            {
                precision: statistics.median(rate.products[precision] for rate in rates)
                for precision in rates[0].products
            },
        )

    def compare(self, case: EngineCase, slower: EngineVariant, faster: EngineVariant) -> float:
        """Return how many times as fast `faster` is: the median over the samples."""
        pairs = zip(self.samples[slower, case], self.samples[faster, case], strict=True)
        return statistics.median(first.seconds / second.seconds for first, second in pairs)


def main(
    options: argparse.Namespace, console: Console, command: str, sizes: RateSizes = SIZES
) -> list[ResultRow]:
    """Measure the engines. Raises ValueError for bad options."""
    threads = options.threads or len(os.sched_getaffinity(0))
    cases = plan_cases(options)
    with open_model(options.model) as model:
        variants = plan_variants(model, options.cpu_kernels, options.quantize, options.before)
        rounds = measure_rounds(model, variants, cases, threads, options.rounds, sizes)
        rows = [
            *_rate_rows(rounds.median_rates(), threads, command),
            *_step_rows(rounds, model, variants, cases, command),
            *_ratio_rows(rounds, variants, cases, command),
        ]
    print_rows(console, f"engine: {options.model}, {threads} threads", rows)
    return rows


def plan_cases(options: argparse.Namespace) -> list[EngineCase]:
    """Return the steps to measure. Raises ValueError."""
    counts = (options.rounds, options.steps, options.context, options.threads + 1)
    batches, prompts = (
        [int(word) for word in text.split(",") if word]
        for text in (options.batches, options.prompts)
    )
    if min(*counts, *batches, *prompts) < 1 or not batches + prompts:
        names = "--batches, --prompts, --context, --steps, --rounds and --threads"
        raise ValueError(f"{names} must be 1 or more")
    decode = [DecodeCase(batch, options.context, options.steps) for batch in batches]
    return [*decode, *(PrefillCase(tokens) for tokens in prompts)]


def plan_variants(
    model: MeasuredModel, kernels: str, quantize: str, before: Path | None = None
) -> list[EngineVariant]:
    """Return an engine for each combination of kernels, build and quantization.

    `before` is another build of the native kernels, or None. Raises ValueError.
    """
    available = worker.list_kernels()
    chosen = [name for name in kernels.split(",") if name] or available
    quantizations = [name for name in quantize.split(",") if name]
    if unavailable := sorted(set(chosen) - set(available)):
        raise ValueError(
            f"--cpu-kernels {','.join(unavailable)}: this CPU has {', '.join(available)}"
        )
    known = worker.list_quantizations()
    if not quantizations or not set(quantizations) <= set(known):
        raise ValueError(f"--quantize {quantize!r}: there are {', '.join(known)}")
    if before is not None:
        worker.open_build(before)
    return [
        EngineVariant(name, model.dtype, quantization, compact, build)
        for name in chosen
        for build in ([None, before] if before and name == "native" else [None])
        for quantization in quantizations
        for compact in (
            (True, False)
            if worker.supports_compact_weights(name, model.dtype, quantization)
            else (False,)
        )
    ]


def measure_rounds(
    model: MeasuredModel,
    variants: Sequence[EngineVariant],
    cases: Sequence[EngineCase],
    threads: int,
    count: int,
    sizes: RateSizes,
) -> EngineRounds:
    """Measure rates and steps in turn, `count` times after a round that does not count."""
    rounds = EngineRounds()
    with ExitStack() as stack:
        machine = stack.enter_context(worker.start_worker())
        engines = {variant: stack.enter_context(worker.start_worker()) for variant in variants}
        cache_bytes = _choose_cache_bytes(model, cases)
        for variant, engine in engines.items():
            engine.submit(worker.load_engine, model, variant, threads, cache_bytes).result()
        for number in range(count + 1):
            products = machine.submit(worker.measure_products, model, threads, sizes).result()

            def measure_read() -> float:
                return machine.submit(worker.measure_read_rate, threads, sizes.read_bytes).result()

            found = _sample_round(engines, cases, measure_read, products)
            for key, samples in found.items() if number else ():
                rounds.samples[key] += samples
    return rounds


def _sample_round(
    engines: dict[EngineVariant, Executor],
    cases: Sequence[EngineCase],
    measure_read: Callable[[], float],
    products: dict[str, float],
) -> dict[tuple[EngineVariant, EngineCase], list[StepSample]]:
    """Measure reading and the engines in turn, so that each sample lies between two reads."""
    found: dict[tuple[EngineVariant, EngineCase], list[StepSample]] = defaultdict(list)
    before = measure_read()
    for case in cases:
        for _, (variant, engine) in product(range(case.turns), engines.items()):
            seconds = engine.submit(worker.time_case, case).result()
            after = measure_read()
            rates = CpuRates((before + after) / 2, products)
            found[variant, case].append(StepSample(seconds, rates))
            before = after
    return found


def _choose_cache_bytes(model: MeasuredModel, cases: Sequence[EngineCase]) -> int:
    tokens = [
        case.tokens if isinstance(case, PrefillCase) else case.batch * (case.context + case.steps)
        for case in cases
    ]
    return int(_CACHE_RESERVE * max(tokens) * model.bounds.kv_token_bytes)


def _rate_rows(rates: CpuRates, threads: int, command: str) -> list[ResultRow]:
    note = f"{threads} threads"
    rows = [
        make_row(
            "engine/read",
            rates.read_bytes / 1e9,
            "GB/s",
            command,
            note=f"{note}, {describe_reading()}",
        )
    ]
    for precision, rate in rates.products.items():
        name = f"engine/products_{worker.short_name(precision)}"
        rows.append(make_row(name, rate / 1e9, _UNITS[precision], command, note=f"{note}, torch"))
    return rows


def _step_rows(
    rounds: EngineRounds,
    model: MeasuredModel,
    variants: Sequence[EngineVariant],
    cases: Sequence[EngineCase],
    command: str,
) -> list[ResultRow]:
    """Milliseconds of a step beside the least possible ones."""
    rows = []
    for variant in variants:
        bounds = StepBounds(
            model.config, variant.dtype, variant.quantization, variant.compressed_fraction
        )
        for case in cases:
            if isinstance(case, PrefillCase):
                tokens, find_least = case.tokens, partial(bounds.bound_prefill, case.tokens)
            else:
                tokens = case.batch
                find_least = partial(bounds.bound_decode, case.batch, case.context)
            samples = rounds.samples[variant, case]
            seconds = statistics.median(sample.seconds for sample in samples)
            share = statistics.median(
                sample.find_share(find_least, variant.precision) for sample in samples
            )
            name, note = f"engine/{variant.name}/{case.name}", f"{tokens / seconds:,.0f} tokens/s"
            least = share * seconds
            rows.append(make_time_row(name, seconds * 1e3, "ms", command, least * 1e3, note))
    return rows


def _ratio_rows(
    rounds: EngineRounds,
    variants: Sequence[EngineVariant],
    cases: Sequence[EngineCase],
    command: str,
) -> list[ResultRow]:
    """Speed of each variant relative to torch's kernels, to weights in bf16 and to other builds."""
    builds = {variant.other_build for variant in variants} - {None}
    rows = []
    for variant in variants:
        if variant.other_build is not None:
            continue
        plain = replace(variant, quantization=UNQUANTIZED, compact_weights=False)
        others = [
            ("torch", replace(variant, kernels="torch", compact_weights=False)),
            ("bf16", plain),
            *(("before", replace(variant, other_build=build)) for build in builds),
        ]
        if variant.quantization != UNQUANTIZED:
            others.append(("bf16_compact", replace(plain, compact_weights=True)))
        for suffix, other in others:
            if other == variant or other not in variants:
                continue
            for case in cases:
                name = f"engine/{variant.name}/{case.name}_of_{suffix}"
                value = rounds.compare(case, slower=other, faster=variant)
                rows.append(make_row(name, value, "times as fast", command))
    return rows
