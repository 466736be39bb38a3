"""How well a model predicts text that it was not trained on.

The text is the held-out modules of this Python's standard library: those of Python 3.11 for the
demo model.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.types import BlockIndex, TokenLogprobs
from benchmarks.text.source_files import collect_sources, standard_library_folder
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)

WINDOW_TOKENS = 2048  # a document is scored in windows of so many tokens


def read_held_out_documents(model: Path) -> Iterator[list[int]]:
    """Token ids of each module of the standard library that the demo model was not trained on."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for file in collect_sources(standard_library_folder()):
        if file.is_held_out and not file.is_test:
            yield tokenizer.encode(file.text).ids


def split_windows(documents: Iterable[Sequence[int]], max_tokens: int) -> Iterator[Sequence[int]]:
    """Windows of two to WINDOW_TOKENS tokens, `max_tokens` in all at most."""
    left = max_tokens
    for document in documents:
        if left < 2:
            return
        tokens = document[:left]
        left -= len(tokens)
        for begin in range(0, len(tokens) - 1, WINDOW_TOKENS):
            if len(window := tokens[begin : begin + WINDOW_TOKENS]) > 1:
                yield window


def measure_perplexity(engine: Engine, windows: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative logprob of all tokens but the first of each window."""
    return compute_perplexity(score_windows(engine, windows))


def compute_perplexity(scores: Sequence[TokenLogprobs]) -> float:
    """exp of the mean negative logprob."""
    return math.exp(-sum(score.logprob for score in scores) / len(scores))


def compute_top1_agreement(
    first: Sequence[TokenLogprobs], second: Sequence[TokenLogprobs]
) -> float:
    """The share of places where both have the same most likely token."""
    equal = [
        one.top_logprobs[0][0] == other.top_logprobs[0][0]
        for one, other in zip(first, second, strict=True)
    ]
    return sum(equal) / len(equal)


def score_windows(engine: Engine, windows: Sequence[Sequence[int]]) -> list[TokenLogprobs]:
    """Score all tokens but the first of each window, with the most likely token at each place."""
    layout = engine.layout
    num_blocks = -(-max(map(len, windows)) // layout.block_size) + 1
    engine.bind_cache(memoryview(mmap.mmap(-1, num_blocks * layout.block_bytes)), num_blocks)
    return [score for window in windows for score in _score_window(engine, window, 1)]


def score_tokens(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """The logprobs of all tokens but the first, in one step that writes the first blocks."""
    return [score.logprob for score in _score_window(engine, tokens, 0)]


def _score_window(
    engine: Engine, tokens: Sequence[int], top_logprobs: int
) -> tuple[TokenLogprobs, ...]:
    table = [BlockIndex(block) for block in range(len(tokens) // engine.layout.block_size + 1)]
    spec = PromptLogprobsSpec(tuple(tokens[1:]), top_logprobs)
    slice_ = SequenceSlice(SequenceId(0), tuple(tokens[:-1]), 0, table, None, spec)
    [result] = engine.run(StepBatch((slice_,)))
    return result.prompt_logprobs
