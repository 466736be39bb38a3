"""The card of the bundled model; every figure in it comes from a stage."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo_model import train
from tools.demo_model.common.corpus_files import HELD_OUT_PARTS, PART_SHARES, CorpusFacts
from tools.demo_model.evaluation.continuations import Continuation, ContinuationScores

_PART_NAMES = {
    "library": "modules of the library",
    "tests": "its tests",
    "definitions": "functions and classes of those modules, each on its own",
    "prose": "the language reference that `help()` shows",
    "chat": "questions and answers made of docstrings, and small talk",
}

_TEMPLATE = """# demo

A toy: a Llama with {million_parameters:.1f} M parameters in bfloat16, trained from \
scratch on the \
standard library of
Python {python} and nothing else. It is here so that Baton has something to serve without a \
download. It completes
Python in the manner of the library and answers a few questions about it. **What it says is often \
wrong.**

## Data

| part | documents | MB | tokens | share of the rows |
|---|---|---|---|---|
{data_table}

Files: {library_files} of the library, {test_files} of its tests; near copies, \
tables, and files of
packages of others are left out. One file in twenty is held out, chosen by a hash of its name. \
The tokenizer is a \
byte-level
BPE with {vocabulary} entries, trained on the same text.

The text is Python's own: Copyright (c) 2001 Python Software Foundation, all rights reserved; \
used under the
[PSF License Version 2](https://docs.python.org/3.11/license.html).

## Made with

```
python -m tools.train_demo_model prepare
python -m tools.train_demo_model train {training_options}
python -m tools.train_demo_model export
python -m tools.train_demo_model evaluate
```

`train` ran for {seconds:.0f} s on one {device} that it shared with \
another run, with torch \
{torch}: {steps} steps, {million_tokens:.0f} M tokens.
The other stages ran on a CPU.

## Figures

Held-out bits per byte, of the weights in training (all of each part) and of this folder in \
float32 (the first
{held_out_tokens} tokens of each):

| part | in training | this folder |
|---|---|---|
{held_out_table}

Of {openings} openings of `def`, `class` and `import` that stand nowhere in the training \
data, continued greedily in
bfloat16 by up to {max_continuation_tokens} tokens and cut at the last whole line:

| | |
|---|---|
| pass `ast.parse` | **{python_share:.0%}** |
| ended by the model itself | {ended_share:.0%} |
| repeat a line three times or more | {repeat_share:.0%} |
| lines written, median | {median_lines:g} |

{remark}

## Samples

Continuations at fixed places in the list of openings, greedy, not chosen:

{continuation_samples}

Chat, greedy:

{chat_samples}

## Limits

It knows shapes, not facts: names, arguments and meanings are made up freely, and greedy text \
tends to go round in
circles. It has read no prose but documentation, no language but English and Python, and has no \
notion of safety. Its
context is 2048 tokens. Use it to see a server work, for nothing else.
"""


@dataclass(frozen=True, slots=True)
class ModelEvaluation:
    """Figures of the exported model."""

    parameter_count: int
    max_continuation_tokens: int
    held_out_tokens: int  # of each part, from its start
    held_out_bits: Mapping[str, float]  # bits per byte by part
    scores: ContinuationScores
    samples: Sequence[Continuation]
    chat_samples: Sequence[tuple[str, str]]  # question, answer
    remark: str = ""


def render_model_card(
    facts: CorpusFacts,
    training: Mapping[str, Any],
    best: Mapping[str, Any],
    evaluation: ModelEvaluation,
) -> str:
    """Return the card.

    `training` is `training.json`; `best` is the line of the training log that belongs to the
    weights.
    """
    scores = evaluation.scores
    return _TEMPLATE.format(
        million_parameters=evaluation.parameter_count / 1e6,
        python=facts.python,
        data_table=_data_table(facts),
        library_files=facts.files["library"],
        test_files=facts.files["tests"],
        vocabulary=facts.vocabulary,
        training_options=_training_options(training),
        seconds=training["seconds"],
        device=training["device"],
        torch=training["torch"],
        steps=training["steps"],
        million_tokens=training["tokens"] / 1e6,
        held_out_tokens=evaluation.held_out_tokens,
        held_out_table=_held_out_table(best, evaluation),
        openings=scores.count,
        max_continuation_tokens=evaluation.max_continuation_tokens,
        python_share=scores.python_share,
        ended_share=scores.ended_share,
        repeat_share=scores.repeat_share,
        median_lines=scores.median_lines,
        remark=evaluation.remark,
        continuation_samples=_continuation_samples(evaluation.samples),
        chat_samples=_chat_samples(evaluation.chat_samples),
    )


def _data_table(facts: CorpusFacts) -> str:
    return "\n".join(
        f"| {_PART_NAMES[part]} | {facts.documents[part]} | {facts.utf8_bytes[part] / 1e6:.1f} "
        f"| {facts.tokens[part]} | {share:.0%} |"
        for part, share in PART_SHARES.items()
    )


def _training_options(training: Mapping[str, Any]) -> str:
    """Return the training options that are not at their default."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    settings = {
        key: str(value)
        for key, value in training["settings"].items()
        if key not in ("device", "no_compile")
    }
    defaults = vars(parser.parse_args([]))
    return " ".join(
        f"--{key.replace('_', '-')} {value}"
        for key, value in settings.items()
        if value != str(defaults.get(key))
    )


def _held_out_table(best: Mapping[str, Any], evaluation: ModelEvaluation) -> str:
    return "\n".join(
        f"| {_PART_NAMES[part]} | {best[f'held_out_{part}']:.3f} "
        f"| {evaluation.held_out_bits[part]:.3f} |"
        for part in HELD_OUT_PARTS
    )


def _continuation_samples(samples: Sequence[Continuation]) -> str:
    return "\n\n".join(f"```python\n{sample.whole_lines.rstrip()}\n```" for sample in samples)


def _chat_samples(chat: Sequence[tuple[str, str]]) -> str:
    return "\n\n".join(
        f"> **{question}**\n>\n> " + answer.replace("\n", "\n> ") for question, answer in chat
    )
