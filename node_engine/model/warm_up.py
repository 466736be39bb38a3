"""Steps before those of the first request. What is done once (kernels compiled, libraries loaded, memory taken from the
device) takes seconds on a GPU: whoever came first would wait for it, and the coordinator would take it for the speed of
the node."""

from collections.abc import Iterator, Sequence

from baton.types import BlockIndex, SamplingParams
from node_engine.core.step import SampleSpec, SequenceId, Slice, StepBatch

ON_CPU, ON_GPU = (4, 24), (4, 24, 256, 1024)  # tokens of a prompt: other kernels are chosen for other sizes
_DRAWS = (SamplingParams(1, temperature=0.0), SamplingParams(1, temperature=1.0, top_k=2, top_p=0.5))


def warm_up_steps(prompts: Sequence[int], block_size: int, num_blocks: int, max_model_len: int) -> Iterator[StepBatch]:
    """Each prompt, then a token drawn in each way, then as much again behind it beside a decode slice; at last a copied
    block. All in the first blocks, which are left like those of a request that has ended. What does not fit into the
    cache or the longest context is left out."""
    if num_blocks < 2:
        return
    beside, table = [BlockIndex(0)], [BlockIndex(block) for block in range(1, num_blocks)]
    fits = min(len(table) * block_size, max_model_len)
    decode = _slice(0, 1, beside, 0, sequence=1)
    for prompt in prompts:
        if prompt + len(_DRAWS) > fits:
            break
        yield StepBatch((_slice(0, prompt, table, 0),))
        for number in range(len(_DRAWS)):
            yield StepBatch((_slice(prompt + number, 1, table, number),))
        if 2 * prompt <= fits:
            yield StepBatch((decode, _slice(prompt, prompt, table, 0)))
    yield StepBatch((), copies=((BlockIndex(0), BlockIndex(1)),))


def _slice(start: int, count: int, table: list[BlockIndex], draw: int, sequence: int = 0) -> Slice:
    return Slice(SequenceId(sequence), (0,) * count, start, table, SampleSpec(_DRAWS[draw], 0, start + count))
