"""Steps that warm up an engine before its first request.

One-time work (compiling kernels, loading libraries, allocating device memory) takes seconds on a
GPU. Otherwise the first request would wait for it, and the coordinator would mistake its duration
for the speed of the node.
"""

from collections.abc import Iterator, Sequence

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch

# In tokens: libraries select other kernels for other sizes, which a GPU loads at their first use.
CPU_PROMPT_LENGTHS = (4, 24)
GPU_PROMPT_LENGTHS = (4, 24, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_MIXED_PROMPT_TOKENS = 4
_BLOCK_COPY = StepBatch((), block_copies=((BlockIndex(0), BlockIndex(1)),))
_SAMPLING_CASES = (
    SamplingParams(1, temperature=0.0),
    SamplingParams(1, temperature=1.0, top_k=2, top_p=0.5),
)


def iter_warm_up_steps(
    prompts: Sequence[int],
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_batched_tokens: int,
) -> Iterator[StepBatch]:
    """Warm-up steps for prompts of the given lengths, in tokens, in an empty cache.

    For each length: a prompt, one decode step for each way of sampling, and a mixed step of a
    second chunk and a decode slice; at the end a block copy. Lengths that do not fit into the cache
    or the longest context are skipped; prompts that do not fit into a step beside a decode slice
    are cut.
    """
    if num_blocks < 2:
        return
    decode_table = [BlockIndex(0)]
    table = [BlockIndex(block) for block in range(1, num_blocks)]
    fits = min(len(table) * block_size, max_model_len)
    decode = _slice(0, 1, decode_table, 0, sequence=1)
    for prompt in dict.fromkeys(min(length, max_batched_tokens - 1) for length in prompts):
        if prompt + len(_SAMPLING_CASES) > fits:
            break
        yield StepBatch((_slice(0, prompt, table, 0),))
        for number in range(len(_SAMPLING_CASES)):
            yield StepBatch((_slice(prompt + number, 1, table, number),))
        if 2 * prompt <= fits:
            yield StepBatch((decode, _slice(prompt, prompt, table, 0)))
    yield _BLOCK_COPY


def list_mixed_warm_up_steps(
    block_size: int, num_blocks: int, max_model_len: int
) -> list[StepBatch]:
    """One step of a short prompt and a decode slice, sampled in different ways, and a block copy.

    Enough for an engine that compiles and loads nothing at the first use of a size. Empty if they
    do not fit into the cache or the longest context.
    """
    if num_blocks < 2 or min(block_size, max_model_len) < _MIXED_PROMPT_TOKENS:
        return []
    decode = _slice(0, 1, [BlockIndex(0)], 0, sequence=1)
    prompt = _slice(0, _MIXED_PROMPT_TOKENS, [BlockIndex(1)], 1)
    return [StepBatch((decode, prompt)), _BLOCK_COPY]


def _slice(
    start: int, count: int, table: list[BlockIndex], draw: int, sequence: int = 0
) -> SequenceSlice:
    return SequenceSlice(
        SequenceId(sequence),
        (0,) * count,
        start,
        table,
        SampleSpec(_SAMPLING_CASES[draw], 0, start + count),
    )
