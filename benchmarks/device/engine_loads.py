"""An engine of the measured model in this process, and steps as a scheduler asks for them."""

import gc
import itertools
import mmap
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.shared_memory.memory_map import (
    HUGE_PAGE,
    map_private_memory,
    release_addresses,
    reserve_addresses,
    view_memory,
)
from baton.types import BlockIndex, SamplingParams
from benchmarks.device.activities import DeviceActivity, StepProfile
from benchmarks.device.section_run import MeasuredModel
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch
from node_engine.model.model_loader import load_model_engine

_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
_WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of the engine and of its cache."""

    max_model_len: int = 16384
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    cache_bytes: int = 8 << 30  # far beyond the caches of the device; contexts share blocks


def _allocate_arena(num_bytes: int, device: str) -> memoryview:
    """Map memory for a KV cache. For CPUs, allocate all of it now, in huge pages if possible."""
    if device != "cpu":
        return memoryview(mmap.mmap(-1, num_bytes))
    address, start, reserved = reserve_addresses(num_bytes, HUGE_PAGE)
    map_private_memory(address, num_bytes)
    return view_memory(address, num_bytes, lambda: release_addresses(start, reserved))


class LoadedEngine:
    """An engine with a bound cache that is warmed up."""

    def __init__(self, model: MeasuredModel, device: str, sizes: EngineSizes, **options: Any):
        """`options` are further arguments of load_model_engine."""
        self.engine: Engine = load_model_engine(
            model.folder,
            device=device,  # type: ignore[arg-type]
            load_format=model.load_format,  # type: ignore[arg-type]
            max_model_len=min(sizes.max_model_len, model.config.max_position_embeddings),
            max_num_seqs=sizes.max_num_seqs,
            **options,
        )
        layout = self.engine.layout
        self.num_blocks = max(2, sizes.cache_bytes // layout.block_bytes)
        self._next_sequence = 0
        arena = _allocate_arena(self.num_blocks * layout.block_bytes, device)
        self.engine.bind_cache(arena, self.num_blocks)
        self.engine.warm_up(sizes.max_batched_tokens)

    def make_tables(self, sequences: int, tokens: int) -> list[list[BlockIndex]]:
        """Block tables for so many tokens each. Sequences share blocks if there are too few."""
        blocks = self.engine.layout.count_blocks(tokens)
        return [
            [BlockIndex((i * blocks + j) % self.num_blocks) for j in range(blocks)]
            for i in range(sequences)
        ]

    def new_sequence(self) -> SequenceId:
        self._next_sequence += 1
        return SequenceId(self._next_sequence)

    def make_chunk(self, tokens: int) -> SequenceSlice:
        """The whole prompt of a new sequence, whose next token is sampled."""
        (table,) = self.make_tables(1, tokens + 1)
        ids = tuple(number % self.engine.vocab_size for number in range(tokens))
        return SequenceSlice(self.new_sequence(), ids, 0, table, SampleSpec(_GREEDY, 0, tokens))

    def close(self) -> None:
        """Free the device's memory, for another engine."""
        del self.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass
class DecodeRun:
    """Sequences that decode together, one step after another."""

    loaded: LoadedEngine
    batch: int
    context: int  # tokens of each sequence in the first step
    max_steps: int
    params: SamplingParams = _GREEDY
    _sequences: list[SequenceId] = field(default_factory=list)
    _tables: list[list[BlockIndex]] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _steps: int = 0

    def __post_init__(self) -> None:
        self._sequences = [self.loaded.new_sequence() for _ in range(self.batch)]
        self._tables = self.loaded.make_tables(self.batch, self.context + self.max_steps + 2)
        self._tokens = [7] * self.batch

    def list_slices(self) -> tuple[SequenceSlice, ...]:
        """What the next step computes: one token of each sequence, whose successor is sampled."""
        start = self.context + self._steps
        return tuple(
            SequenceSlice(sequence, (token,), start, table, SampleSpec(self.params, 0, start + 1))
            for sequence, token, table in zip(
                self._sequences, self._tokens, self._tables, strict=True
            )
        )

    def run_step(self) -> None:
        """Run a step and take its tokens for the next one."""
        results = self.loaded.engine.run(StepBatch(self.list_slices()))
        self._tokens = [result.token_id or 0 for result in results]
        self._steps += 1


def time_decode(
    loaded: LoadedEngine,
    batch: int,
    context: int,
    steps: int,
    params: SamplingParams = _GREEDY,
    warm_up: int = _WARM_UP_STEPS,  # 1 or more
) -> float:
    """Median seconds between the ends of steps. The mean context is the given one."""
    total = steps + warm_up
    decoding = DecodeRun(loaded, batch, max(1, context - total // 2), total, params)
    ends = []
    for _ in range(total):
        decoding.run_step()
        ends.append(time.perf_counter())
    spans = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return statistics.median(spans[warm_up - 1 :])


def time_prefill(loaded: LoadedEngine, tokens: int, rounds: int = 5, warm_up: int = 2) -> float:
    """Median seconds of a step with one prompt, until its token is known, on an idle device."""
    seconds = []
    for _ in range(rounds + warm_up):
        batch = StepBatch((loaded.make_chunk(tokens),))
        if torch.cuda.is_available():  # the step before has launched another one ahead
            torch.cuda.synchronize()
        started = time.perf_counter()
        loaded.engine.run(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warm_up:])


def profile_decode(loaded: LoadedEngine, batch: int, context: int, steps: int = 8) -> StepProfile:
    """Profile decode steps that follow one another."""
    decoding = DecodeRun(loaded, batch, context, steps + _WARM_UP_STEPS)
    for _ in range(_WARM_UP_STEPS):
        decoding.run_step()
    return _profile(steps, [decoding.run_step] * steps)


def profile_steps(
    loaded: LoadedEngine, decode_rows: int, context: int, chunk_tokens: int, steps: int = 3
) -> StepProfile:
    """Profile steps of `decode_rows` decode slices and one prefill chunk."""
    decoding = DecodeRun(loaded, decode_rows, context, 2)

    def run_step() -> None:
        batch = StepBatch((*decoding.list_slices(), loaded.make_chunk(chunk_tokens)))
        loaded.engine.run(batch)

    run_step()
    run_step()
    return _profile(steps, [run_step] * steps)


def _profile(steps: int, calls: Sequence[Any]) -> StepProfile:
    from torch.profiler import ProfilerActivity, profile

    has_device = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_device else [])]
    with profile(activities=kinds, acc_events=True) as recorded:
        for call in calls:
            call()
        if has_device:
            torch.cuda.synchronize()
    activities, host_calls = [], []
    for event in recorded.events() or ():
        if event.device_type.name == "CPU":
            host_calls.append(event.name)
        else:
            span = event.time_range  # in microseconds
            activities.append(DeviceActivity(span.start / 1e6, span.end / 1e6, event.id))
    return StepProfile(steps, activities, host_calls)
