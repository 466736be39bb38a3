"""Measure what quantization costs: perplexity of text that the demo model was not trained on.

python -m tools.perplexity      bf16 and FP8; on a CPU, FP8 is emulated

The text is the held-out modules of this Python's standard library: those of Python 3.11 for the
demo model.
"""

import argparse
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.models.model_identity import FP8, UNQUANTIZED
from baton.types import BlockIndex
from node_engine.core.step.engine import Engine
from node_engine.core.step.step_batch import (
    PromptLogprobsSpec,
    SequenceId,
    SequenceSlice,
    StepBatch,
)
from node_engine.model.model_loader import load_model_engine
from tools.demo_model.corpus.source_files import collect_sources, standard_library_folder

DEFAULT_MODEL = Path("models/demo")
DEFAULT_TOKENS = 65536
WINDOW_TOKENS = 2048  # a document is scored in windows of so many tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a folder")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="score so many at most")
    options = parser.parse_args()
    windows = list(split_windows(read_held_out_documents(options.model), options.tokens))
    print(f"{sum(map(len, windows))} tokens in {len(windows)} windows")
    found = []
    for quantize in (UNQUANTIZED, FP8):
        engine = load_model_engine(
            options.model,
            dtype="bfloat16",
            quantize=quantize,
            max_model_len=WINDOW_TOKENS,
            uses_graphs=False,
            emulates_fp8=True,
        )
        found.append(measure_perplexity(engine, windows))
        print(f"quantize {quantize}: perplexity {found[-1]:.4f}", flush=True)
    print(f"fp8 over bf16: {found[1] / found[0] - 1:+.3%}")


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
    layout = engine.layout
    num_blocks = -(-max(map(len, windows)) // layout.block_size) + 1
    engine.bind_cache(memoryview(mmap.mmap(-1, num_blocks * layout.block_bytes)), num_blocks)
    logprobs = [logprob for window in windows for logprob in score_tokens(engine, window)]
    return math.exp(-sum(logprobs) / len(logprobs))


def score_tokens(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """The logprobs of all tokens but the first, in one step that writes the first blocks."""
    table = [BlockIndex(block) for block in range(len(tokens) // engine.layout.block_size + 1)]
    spec = PromptLogprobsSpec(tuple(tokens[1:]), top_logprobs=0)
    slice_ = SequenceSlice(SequenceId(0), tuple(tokens[:-1]), 0, table, None, spec)
    [result] = engine.run(StepBatch((slice_,)))
    return [score.logprob for score in result.prompt_logprobs]


if __name__ == "__main__":
    main()
