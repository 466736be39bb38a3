"""Steps before those of the first request. What is done once (kernels compiled, libraries loaded,
memory taken from the device) takes seconds on a GPU: whoever came first would wait for it, and the
coordinator would take it for the speed of the node."""

from collections.abc import Iterator, Sequence

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step.step_batch import SampleSpec, SequenceId, SequenceSlice, StepBatch

CPU_PROMPT_LENGTHS, GPU_PROMPT_LENGTHS = (
    (4, 24),
    (4, 24, 256, 1024),
)  # tokens of a prompt: other kernels are chosen for other sizes
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
    """Each prompt, then a token drawn in each way, then as much again behind it beside a decode
    slice; at last a copied block. All in the first blocks, which are left like those of a request
    that has ended. What does not fit into the cache or the longest context is left out; prompts
    that do not fit into a step beside that slice are cut."""
    if num_blocks < 2:
        return
    beside, table = [BlockIndex(0)], [BlockIndex(block) for block in range(1, num_blocks)]
    fits = min(len(table) * block_size, max_model_len)
    decode = _slice(0, 1, beside, 0, sequence=1)
    for prompt in dict.fromkeys(min(each, max_batched_tokens - 1) for each in prompts):
        if prompt + len(_SAMPLING_CASES) > fits:
            break
        yield StepBatch((_slice(0, prompt, table, 0),))
        for number in range(len(_SAMPLING_CASES)):
            yield StepBatch((_slice(prompt + number, 1, table, number),))
        if 2 * prompt <= fits:
            yield StepBatch((decode, _slice(prompt, prompt, table, 0)))
    yield StepBatch((), block_copies=((BlockIndex(0), BlockIndex(1)),))


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
