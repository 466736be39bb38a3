"""The stage on the smallest model there is: every figure of the card comes from it."""

import argparse
import json

import numpy as np
import pytest
import torch

from tools.demo_model import evaluate, train
from tools.demo_model.common import bpe_tokenizer as tokenizer
from tools.demo_model.common import corpus_files as corpus
from tools.demo_model.evaluation.exported_model import ExportedModel
from tools.demo_model.export import export_model
from tools.demo_model.training import checkpoint
from tools.demo_model.training.llama import LlamaForTraining, LlamaShape

TEXT = "<|bos|>def f(x):\n    return x + 1\n<|eos|>"
SHAPE = {
    "hidden": 16,
    "intermediate": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "context": 256,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    root = tmp_path_factory.mktemp("evaluated")
    words = tokenizer.train_tokenizer([TEXT] * 3, 270)
    words.save(str(root / tokenizer.TOKENIZER_FILE))
    torch.manual_seed(0)
    checkpoint.save_checkpoint(
        root / "best", LlamaForTraining(LlamaShape(words.get_vocab_size(), **SHAPE))
    )
    export_model(root, root / "best", root / "model")
    tokens = np.array(words.encode(TEXT, add_special_tokens=False).ids * 4, dtype=np.uint16)
    facts = corpus.CorpusFacts("3.11.0", words.get_vocab_size(), {"library": 1, "tests": 1})
    for part in (*corpus.PART_SHARES, *(f"held_out_{name}" for name in corpus.HELD_OUT_PARTS)):
        corpus.save_tokens(root, part, tokens)
        facts.documents[part], facts.utf8_bytes[part], facts.tokens[part] = 4, 4 * 27, len(tokens)
    corpus.save_facts(root, facts)
    settings = {"steps": "12", "dropout": "0.1", "no_compile": "False"}
    summary = {
        "device": "Toy",
        "seconds": 7.4,
        "steps": 12,
        "tokens": 12e6,
        "torch": "2",
        "settings": settings,
    }
    (root / train.SUMMARY_FILE).write_text(json.dumps(summary))
    lines = [
        {f"held_out_{name}": figure for name in corpus.HELD_OUT_PARTS}
        for figure in (3.25, 1.75, 2.5)
    ]
    (root / train.LOG_FILE).write_text("\n".join(map(json.dumps, lines)))
    return argparse.Namespace(
        data=root, trained=root, model=root / "model", tokens=60, note="A remark.", show=False
    )


def test_model_card(
    made: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "CONTINUATION_TOKENS", 4)
    evaluate.run(made)
    figures = json.loads(capsys.readouterr().out)
    card = (made.model / "README.md").read_text()
    assert "train_demo_model train --steps 12\n" in card
    assert "| its tests | 1.750 |" in card  # the line of the log that was kept
    assert f"**{figures['python_share']:.0%}**" in card
    assert figures["count"] == 50
    assert "A remark." in card
    for question in evaluate.QUESTIONS:
        assert question in card


def test_held_out_bits_of_a_model_that_knows_nothing(made: argparse.Namespace) -> None:
    model = ExportedModel(made.model, torch.float32)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    tokens = corpus.load_tokens(made.data, "library")
    counted = sum(int(token) != 0 for token in tokens)
    expected = counted * np.log2(model.model.config.vocab_size) / (4 * 27)
    assert evaluate.compute_held_out_bits(model, tokens) == pytest.approx(expected, rel=1e-4)


def test_an_opening_that_was_trained_on_is_refused(
    made: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "OPENINGS", ("def f(x):\n",))
    with pytest.raises(SystemExit, match="library"):
        evaluate.reject_seen_openings(ExportedModel(made.model, torch.float32), made.data)


def test_prompts_of_different_length_are_continued_as_each_alone(made: argparse.Namespace) -> None:
    model = ExportedModel(made.model, torch.float32)
    texts = ["def f(x):\n", "d", "    return x + 1"]
    assert model.complete_texts(texts, 6) == [model.complete_texts([text], 6)[0] for text in texts]
