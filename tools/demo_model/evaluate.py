"""Stage `evaluate`: measure the exported model and write the figures into its card."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.demo_model import train
from tools.demo_model.common import corpus_files as corpus
from tools.demo_model.common.corpus_files import TokenArray
from tools.demo_model.evaluation.continuations import Continuation, score_continuations
from tools.demo_model.evaluation.exported_model import ExportedModel
from tools.demo_model.evaluation.openings import OPENINGS
from tools.demo_model.model_card import ModelEvaluation, render_model_card
from tools.demo_model.training.held_out_loss import bits_per_byte, sum_nats

CONTINUATION_TOKENS = 192  # most tokens of a continuation
QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What does os.path.isdir do?",
    "What does shutil.copyfile do?",
    "Which module has OrderedDict?",
    "How do I read a file?",
)
TRAINING_PARTS = ("library", "tests", "definitions")  # parts that must contain no opening


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, default=Path(".demo/corpus"), help="folder that `prepare` wrote"
    )
    parser.add_argument(
        "--trained", type=Path, default=Path(".demo/trained"), help="folder that `train` wrote"
    )
    parser.add_argument(
        "--model", type=Path, default=Path("models/demo"), help="folder that `export` wrote"
    )
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of each held-out part, from its start"
    )
    parser.add_argument(
        "--note", default="", help="a remark for the card: how these weights were chosen"
    )
    parser.add_argument("--show", action="store_true", help="print every continuation too")


def run(arguments: argparse.Namespace) -> None:
    served = ExportedModel(arguments.model, torch.bfloat16)
    reject_seen_openings(served, arguments.data)
    completed = served.complete_texts(OPENINGS, CONTINUATION_TOKENS)
    continuations = [
        Continuation(opening, *end) for opening, end in zip(OPENINGS, completed, strict=True)
    ]
    if arguments.show:
        for continuation in continuations:
            language = "Python" if continuation.is_python else "not Python"
            print(f"--- {language}{', repeats' if continuation.has_repetition else ''}")
            print(continuation.whole_lines)
    wide = ExportedModel(arguments.model, torch.float32)
    evaluation = ModelEvaluation(
        parameter_count=served.parameter_count,
        max_continuation_tokens=CONTINUATION_TOKENS,
        held_out_tokens=arguments.tokens,
        held_out_bits={
            name: compute_held_out_bits(
                wide, corpus.load_tokens(arguments.data, f"held_out_{name}")[: arguments.tokens]
            )
            for name in corpus.HELD_OUT_PARTS
        },
        scores=score_continuations(continuations),
        samples=continuations[:: len(continuations) // 4][:4],  # at fixed places, not the best
        chat_samples=[
            (question, served.answer_question(question, CONTINUATION_TOKENS))
            for question in QUESTIONS
        ],
        remark=arguments.note,
    )
    training = json.loads((arguments.trained / train.SUMMARY_FILE).read_text())
    text = render_model_card(
        corpus.load_facts(arguments.data),
        training,
        find_best_log_line(arguments.trained),
        evaluation,
    )
    (arguments.model / "README.md").write_text(text)
    print(json.dumps({"held_out": evaluation.held_out_bits, **asdict(evaluation.scores)}, indent=2))


def reject_seen_openings(model: ExportedModel, data: Path) -> None:
    for part in TRAINING_PARTS:
        text = model.decode(corpus.load_tokens(data, part).tolist())
        if present := [opening for opening in OPENINGS if opening in text]:
            raise SystemExit(
                f"part {part} has the opening {present[0]!r}: an evaluation needs others"
            )


def compute_held_out_bits(model: ExportedModel, tokens: TokenArray) -> float:
    """Return bits per byte of the text that the tokens encode."""
    utf8_bytes = len(model.decode(tokens.tolist()).encode())
    return bits_per_byte(
        sum_nats(model, tokens, torch.device("cpu"), model.context_tokens), utf8_bytes
    )


def find_best_log_line(trained: Path) -> Mapping[str, Any]:
    """Return the line of the training log that belongs to the saved weights."""
    lines = [json.loads(line) for line in (trained / train.LOG_FILE).read_text().splitlines()]
    best: Mapping[str, Any] = min(lines, key=lambda line: float(line[train.SELECTION_METRIC]))
    return best
