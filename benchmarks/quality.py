"""`quality`: what quantization costs, on text that the demo model was not trained on.

Each setting is compared with bf16: the perplexity of the text, whose limit is 1% more than that of
bf16, and how often the most likely next token is the same. Whatever the machine has no kernels for
is computed by its reference in torch on the CPU, with the same numbers. The text is the held-out
modules of this Python's standard library: those of Python 3.11 for the demo model.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from baton.cli.common.default_model import find_default_model
from baton.errors import ConfigError
from baton.models.model_identity import FP8, INT8, UNQUANTIZED, KVDType, Quantization
from baton.types import TokenLogprobs
from benchmarks.figures.report import HardwareMissing, ResultRow, make_row, print_rows
from benchmarks.text.text_scores import (
    WINDOW_TOKENS,
    compute_perplexity,
    compute_top1_agreement,
    read_held_out_documents,
    score_windows,
    split_windows,
)
from node_engine.model.model_loader import load_model_engine

HELP = "perplexity and top-1 agreement of int8 and fp8 with bf16, on held-out text"
DEFAULT_TOKENS = 65536
MAX_PERPLEXITY_RATIO = 1.01  # of a quantized model to bf16


class QualityCase(NamedTuple):
    """Settings of an engine whose quality is measured."""

    name: str
    quantize: Quantization
    kv_dtype: KVDType = "auto"


BASELINE = QualityCase("bf16", UNQUANTIZED)
CASES = (
    QualityCase("int8", INT8),
    QualityCase("int8_kv", UNQUANTIZED, "int8"),
    QualityCase("int8_and_int8_kv", INT8, "int8"),
    QualityCase("fp8", FP8),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a folder (default: the bundled demo model)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=DEFAULT_TOKENS,
        help=f"score so many at most (default {DEFAULT_TOKENS})",
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")


def main(options: argparse.Namespace, console: Console, command: str) -> list[ResultRow]:
    try:
        model = options.model or find_default_model()
    except ConfigError as error:
        raise HardwareMissing(str(error)) from error
    if not (model / "tokenizer.json").is_file():
        raise ConfigError(f"--model {model}: there is no tokenizer.json")
    windows = list(split_windows(read_held_out_documents(model), options.tokens))
    rows = measure_quality(model, windows, command, CASES, options.threads)
    tokens = sum(map(len, windows))
    print_rows(console, f"quality on {tokens} tokens in {len(windows)} windows", rows)
    return rows


def measure_quality(
    model: Path,
    windows: Sequence[Sequence[int]],
    command: str,
    cases: Sequence[QualityCase] = CASES,
    threads: int = 1,
) -> list[ResultRow]:
    """Return perplexity and top-1 agreement of each case, after the perplexity of bf16."""
    baseline = score_case(model, windows, BASELINE, threads)
    perplexity = compute_perplexity(baseline)
    limit = perplexity * MAX_PERPLEXITY_RATIO
    rows = [make_row(f"quality/{BASELINE.name}/perplexity", perplexity, "", command)]
    for case in cases:
        scores = score_case(model, windows, case, threads)
        found = compute_perplexity(scores)
        note = f"{found / perplexity - 1:+.2%}"
        agreement = 100 * compute_top1_agreement(baseline, scores)
        rows += [
            make_row(f"quality/{case.name}/perplexity", found, "", command, limit, note),
            make_row(f"quality/{case.name}/top1_agreement", agreement, "%", command),
        ]
    return rows


def score_case(
    model: Path, windows: Sequence[Sequence[int]], case: QualityCase, threads: int = 1
) -> list[TokenLogprobs]:
    """Score all tokens of the windows with an engine on the CPU."""
    engine = load_model_engine(
        model,
        dtype="bfloat16",
        device="cpu",
        quantize=case.quantize,
        kv_dtype=case.kv_dtype,
        max_model_len=WINDOW_TOKENS,
        threads=threads,
        emulates_fp8=True,
    )
    return score_windows(engine, windows)
