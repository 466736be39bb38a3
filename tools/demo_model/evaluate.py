"""Stage `evaluate`: figures of the exported folder, into its card."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tools.demo_model import corpus, train
from tools.demo_model.card import Evaluation, card
from tools.demo_model.continuations import Continuation, judge
from tools.demo_model.corpus import Tokens
from tools.demo_model.exported import Exported
from tools.demo_model.loss import bits_per_byte, nats
from tools.demo_model.openings import OPENINGS

LENGTH = 192  # tokens of a continuation
QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What does os.path.isdir do?",
    "What does shutil.copyfile do?",
    "Which module has OrderedDict?",
    "How do I read a file?",
)
SEEN = ("library", "tests", "definitions")  # parts in which no opening may stand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=Path(".demo/corpus"), help="folder that `prepare` wrote")
    parser.add_argument("--trained", type=Path, default=Path(".demo/trained"), help="folder that `train` wrote")
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="folder that `export` wrote")
    parser.add_argument("--tokens", type=int, default=16384, help="of each held-out part, from its start")
    parser.add_argument("--note", default="", help="a remark for the card: how these weights were chosen")
    parser.add_argument("--show", action="store_true", help="print every continuation too")


def run(arguments: argparse.Namespace) -> None:
    served = Exported(arguments.model, torch.bfloat16)
    refuse_openings_seen(served, arguments.data)
    completed = served.complete(OPENINGS, LENGTH)
    continuations = [Continuation(opening, *end) for opening, end in zip(OPENINGS, completed, strict=True)]
    if arguments.show:
        for one in continuations:
            print(f"--- {'Python' if one.parses else 'not Python'}{', repeats' if one.repeats else ''}")
            print(one.whole_lines)
    wide = Exported(arguments.model, torch.float32)
    evaluation = Evaluation(
        parameters=served.parameters_count,
        length=LENGTH,
        tokens=arguments.tokens,
        held_out={
            name: held_out_bits(wide, corpus.load(arguments.data, f"held_out_{name}")[: arguments.tokens])
            for name in corpus.HELD_OUT
        },
        judgement=judge(continuations),
        samples=continuations[:: len(continuations) // 4][:4],  # at fixed places, not the best
        chat=[(question, served.answer(question, LENGTH)) for question in QUESTIONS],
        note=arguments.note,
    )
    training = json.loads((arguments.trained / train.SUMMARY).read_text())
    text = card(corpus.load_facts(arguments.data), training, best_line(arguments.trained), evaluation)
    (arguments.model / "README.md").write_text(text)
    print(json.dumps({"held_out": evaluation.held_out, **asdict(evaluation.judgement)}, indent=2))


def refuse_openings_seen(model: Exported, data: Path) -> None:
    for part in SEEN:
        text = model.decode(corpus.load(data, part).tolist())
        if seen := [opening for opening in OPENINGS if opening in text]:
            raise SystemExit(f"part {part} has the opening {seen[0]!r}: an evaluation needs others")


def held_out_bits(model: Exported, tokens: Tokens) -> float:
    """Bits per byte of the text that the tokens stand for."""
    utf8_bytes = len(model.decode(tokens.tolist()).encode())
    return bits_per_byte(nats(model, tokens, torch.device("cpu"), model.context), utf8_bytes)


def best_line(trained: Path) -> Mapping[str, Any]:
    """The line of the training's log that was written with the weights that were kept."""
    lines = [json.loads(line) for line in (trained / train.LOG).read_text().splitlines()]
    best: Mapping[str, Any] = min(lines, key=lambda line: float(line[train.JUDGE]))
    return best
