"""Section `engine`: steps of the engine in this process, beside the least time for them."""

import statistics
from dataclasses import dataclass

from baton.types import SamplingParams
from benchmarks.device.activities import find_idle_gaps
from benchmarks.device.engine_loads import (
    EngineSizes,
    LoadedEngine,
    profile_decode,
    profile_steps,
    time_decode,
    time_prefill,
)
from benchmarks.device.section_run import SectionRun


@dataclass(frozen=True, slots=True)
class EngineCases:
    """The steps that are measured."""

    # Batch size and tokens of context.
    decode: tuple[tuple[int, int], ...] = (
        *((1, 192), (8, 512), (32, 512)),
        *((64, 512), (128, 512), (256, 512)),
    )
    sampled: tuple[tuple[int, int], ...] = ((1, 192), (32, 512), (64, 512))
    prefill: tuple[int, ...] = (512, 2048, 8192)  # tokens
    profiled: tuple[tuple[int, int], ...] = ((1, 192), (32, 512), (64, 512))
    mixed: tuple[int, int, int] = (32, 512, 512)  # decode rows, their context, tokens of the chunk
    steps: int = 40  # of a decode run


CASES = EngineCases()
SIZES = EngineSizes()
_IDLE_LIMIT = 100.0  # microseconds that the device may wait between two steps
_LAUNCH_LIMIT = 200.0  # launches of a step: more take longer than a short step
_SAMPLED = SamplingParams(max_tokens=1 << 20, temperature=1.0, top_p=0.9, seed=1)


def measure(run: SectionRun, cases: EngineCases = CASES, sizes: EngineSizes = SIZES) -> None:
    """Load the engine and measure its steps."""
    loaded = LoadedEngine(run.model, run.device.type, sizes)
    run.report_progress(f"loaded and warm, {loaded.num_blocks} blocks")
    try:
        measure_decode(run, loaded, cases)
        measure_prefill(run, loaded, cases)
        if run.device.type == "cuda":
            _measure_idle_time(run, loaded, cases)
            _measure_launches(run, loaded, cases)
        _measure_sampled(run, loaded, cases)
    finally:
        loaded.close()


def measure_decode(run: SectionRun, loaded: LoadedEngine, cases: EngineCases) -> None:
    for batch, context in cases.decode:
        run.require_time()
        seconds = time_decode(loaded, batch, context, cases.steps)
        bound = run.model.bounds.bound_decode(batch, context, run.known_rates)
        run.add_time(
            name_decode(batch, context), seconds, bound, f"{batch / seconds:,.0f} tokens/s"
        )


def name_decode(batch: int, context: int) -> str:
    return f"decode_batch_{batch}_of_{context}"


def measure_prefill(run: SectionRun, loaded: LoadedEngine, cases: EngineCases) -> None:
    for tokens in cases.prefill:
        run.require_time()
        seconds = time_prefill(loaded, tokens)
        bound = run.model.bounds.bound_prefill(tokens, run.known_rates)
        run.add_time(name_prefill(tokens), seconds, bound, f"{tokens / seconds:,.0f} tokens/s")


def name_prefill(tokens: int) -> str:
    return f"prefill_{tokens}"


def _measure_idle_time(run: SectionRun, loaded: LoadedEngine, cases: EngineCases) -> None:
    """Time between two decode steps in which the device does nothing, from a profile."""
    for batch, context in cases.profiled:
        run.require_time()
        recorded = profile_decode(loaded, batch, context)
        gaps = find_idle_gaps(recorded.activities)
        if not gaps:
            run.leave_out(f"idle time at batch {batch}: the profile shows no captured steps")
            continue
        note = f"median of {len(gaps)}, greatest {max(gaps) * 1e6:,.0f}"
        idle = statistics.median(gaps) * 1e6
        run.add_row(f"idle_between_steps_batch_{batch}", idle, "us", _IDLE_LIMIT, note)
        launches = recorded.launches_per_step
        name = f"launches_of_decode_step_batch_{batch}"
        run.add_row(name, launches, "launches", _LAUNCH_LIMIT)


def _measure_launches(run: SectionRun, loaded: LoadedEngine, cases: EngineCases) -> None:
    rows, context, tokens = cases.mixed
    for name, decode_rows in (("chunk", 0), ("mixed_step", rows)):
        run.require_time()
        recorded = profile_steps(loaded, decode_rows, context, tokens)
        note = f"{decode_rows} decode slices and a chunk of {tokens} tokens"
        launches = recorded.launches_per_step
        run.add_row(f"launches_of_{name}", launches, "launches", _LAUNCH_LIMIT, note)


def _measure_sampled(run: SectionRun, loaded: LoadedEngine, cases: EngineCases) -> None:
    """Decode steps with temperature 1 and top-p 0.9, beside the greedy ones."""
    for batch, context in cases.sampled:
        run.require_time()
        seconds = time_decode(loaded, batch, context, cases.steps, _SAMPLED)
        bound = run.model.bounds.bound_decode(batch, context, run.known_rates)
        run.add_time(f"sampled_{name_decode(batch, context)}", seconds, bound)
