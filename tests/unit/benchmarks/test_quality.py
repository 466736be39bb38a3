"""`bench quality`: the perplexity of held-out text, by which quantization is judged."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from baton.cli.common.default_model import find_default_model
from baton.errors import ConfigError
from baton.types import TokenLogprobs
from benchmarks import quality
from benchmarks.__main__ import make_parser
from benchmarks.text.text_scores import (
    WINDOW_TOKENS,
    compute_top1_agreement,
    measure_perplexity,
    read_held_out_documents,
    score_tokens,
    split_windows,
)
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model


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


def test_top1_agreement_is_that_of_the_most_likely_tokens() -> None:
    first, second = (
        [TokenLogprobs(-1.0, ((token, -0.5),)) for token in tokens]
        for tokens in ((1, 2, 3, 4), (1, 5, 3, 6))
    )
    assert compute_top1_agreement(first, second) == 0.5
    assert compute_top1_agreement(first, first) == 1.0


def test_each_case_stands_beside_bf16(tmp_path: Path) -> None:
    windows = [[place * 7 % 512 for place in range(length)] for length in (40, 2)]
    folder = build_model("llama", tmp_path, dtype="bfloat16")
    rows = quality.measure_quality(folder, windows, "some command")
    baseline, *others = rows
    assert (baseline.name, baseline.limit) == ("quality/bf16/perplexity", None)
    assert [row.name.split("/")[1] for row in others[::2]] == [case.name for case in quality.CASES]
    for row, agreement in zip(others[::2], others[1::2], strict=True):
        assert row.limit == pytest.approx(1.01 * baseline.value)
        assert row.value != baseline.value
        assert row.note == f"{row.value / baseline.value - 1:+.2%}"
        assert agreement.name == row.name.replace("perplexity", "top1_agreement")
        assert 50 < agreement.value <= 100


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    options = make_parser({"quality": quality}).parse_args(["quality", "--model", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json"):
        quality.main(options, Console(), "some command")


@pytest.mark.slow
def test_quantization_costs_less_than_a_percent() -> None:
    model = find_default_model()
    windows = list(split_windows(read_held_out_documents(model), 3000))
    baseline, *rows = quality.measure_quality(model, windows, "some command")
    assert baseline.value < 20
    for row, agreement in zip(rows[::2], rows[1::2], strict=True):
        assert row.share is not None
        assert row.share < 1
        assert row.value != baseline.value
        assert agreement.value > 90
