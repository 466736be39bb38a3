"""The perplexity of held-out text, by which quantization is judged."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.models.model_identity import FP8, UNQUANTIZED
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model
from tools import perplexity
from tools.perplexity import (
    WINDOW_TOKENS,
    measure_perplexity,
    read_held_out_documents,
    score_tokens,
    split_windows,
)


@pytest.mark.parametrize(
    ("documents", "max_tokens", "lengths"),
    [
        ([range(5)], 100, [5]),
        ([range(1), range(2), range(3)], 100, [2, 3]),
        ([range(2 * WINDOW_TOKENS + 1)], 10**6, [WINDOW_TOKENS, WINDOW_TOKENS]),
        ([range(2 * WINDOW_TOKENS + 2)], 10**6, [WINDOW_TOKENS, WINDOW_TOKENS, 2]),
        ([range(7), range(7)], 9, [7, 2]),
        ([range(7), range(7)], 8, [7]),
        ([range(7), range(7)], 6, [6]),
        ([], 5, []),
    ],
)
def test_windows_cover_documents_up_to_the_bound(
    documents: Sequence[Sequence[int]], max_tokens: int, lengths: list[int]
) -> None:
    assert [len(window) for window in split_windows(documents, max_tokens)] == lengths


def test_perplexity_is_that_of_all_scored_tokens(tmp_path: Path) -> None:
    engine = load_model_engine(build_model("llama", tmp_path), device="cpu")
    windows = [[place * 7 % 512 for place in range(length)] for length in (40, 2)]
    found = measure_perplexity(engine, windows)
    logprobs = [score for window in windows for score in score_tokens(engine, window)]
    assert len(logprobs) == 40
    assert math.log(found) == pytest.approx(-sum(logprobs) / 40, rel=1e-4)


@pytest.mark.slow
def test_fp8_costs_less_than_a_percent() -> None:
    model = Path(perplexity.__file__).parents[1] / perplexity.DEFAULT_MODEL
    windows = list(split_windows(read_held_out_documents(model), 3000))
    plain, quantized = (
        measure_perplexity(
            load_model_engine(
                model, dtype="bfloat16", device="cpu", quantize=quantize, emulates_fp8=True
            ),
            windows,
        )
        for quantize in (UNQUANTIZED, FP8)
    )
    assert plain < 20
    assert quantized == pytest.approx(plain, rel=0.01)
    assert quantized != plain
