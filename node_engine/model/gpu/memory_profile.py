"""Measures how much of a GPU's memory the steps of a model take, before its cache is sized."""

import mmap
from collections.abc import Iterator

import torch

from baton.errors import ConfigError, OutOfMemory
from baton.limits import MAX_LOGPROBS
from baton.shared_memory.available_memory import format_size
from baton.types import BlockIndex, SamplingParams
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.core.step.device_memory import DeviceMemoryProfile
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SampleSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)

# Of the graphs of one bucket of sequences or tokens, beside the tensors that all graphs share.
_BYTES_PER_GRAPH = 32 << 20
_PARAMS = SamplingParams(1, temperature=1.0, top_p=0.9)  # sampling with the most scratch memory


def iter_widest_steps(
    limits: StepLimits, block_size: int, max_model_len: int
) -> Iterator[StepBatch]:
    """The steps that need the most memory: all sequences sampled, and a whole prompt scored.

    All positions are in block 0: their KV is of no interest.
    """
    sequences = min(limits.max_num_seqs, limits.max_batched_tokens)
    lengths = [1] * sequences
    tokens_left = limits.max_batched_tokens - sequences
    for number in range(sequences):
        added = min(tokens_left, max_model_len - 1)
        lengths[number] += added
        tokens_left -= added
    slices = [_build_slice(number, size, block_size) for number, size in enumerate(lengths)]
    yield StepBatch(tuple(slices))
    yield StepBatch((_build_slice(0, lengths[0], block_size, is_scored=True), *slices[1:]))


def run_widest_steps(engine: Engine, limits: StepLimits) -> None:
    """Run the widest steps in a cache of one block, before the real cache is bound.

    Raises what `Engine.bind_cache` and `Engine.run` raise.
    """
    layout = engine.layout
    engine.bind_cache(memoryview(mmap.mmap(-1, layout.block_bytes)), 1)
    for step in iter_widest_steps(limits, layout.block_size, engine.max_model_len):
        engine.run(step)


def profile_device_memory(
    engine: Engine, limits: StepLimits, num_graphs: int
) -> DeviceMemoryProfile:
    """Run the widest steps and read what they took. Weights are loaded, the cache is not bound.

    Graphs of `num_graphs` buckets will be captured. Raises ConfigError if the steps do not fit, and
    DeviceLost.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weight_bytes = torch.cuda.memory_allocated()
    try:
        run_widest_steps(engine, limits)
    except OutOfMemory as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"the GPU has no memory for the widest step of this model: {format_size(free)} of"
            f" {format_size(total)} are free, {format_size(weight_bytes)} are weights: lower"
            " --max-batched-tokens or --max-num-seqs, or stop what else uses the GPU"
        ) from error
    activation_bytes = torch.cuda.max_memory_allocated() - weight_bytes
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemoryProfile(
        total_bytes=total,
        free_bytes=free,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=activation_bytes + num_graphs * _BYTES_PER_GRAPH if num_graphs else 0,
    )


def _build_slice(
    number: int, length: int, block_size: int, *, is_scored: bool = False
) -> SequenceSlice:
    return SequenceSlice(
        SequenceId(number),
        (0,) * length,
        0,
        [BlockIndex(0)] * -(-length // block_size),
        SampleSpec(_PARAMS, 0, length),
        PromptLogprobsSpec((0,) * length, MAX_LOGPROBS) if is_scored else None,
    )
