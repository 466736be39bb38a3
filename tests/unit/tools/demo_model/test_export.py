"""A tiny model, exported: transformers computes the same with it, and its template is the layout of
training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from tools.demo_model.common import bpe_tokenizer as tokenizer
from tools.demo_model.common.chat_format import BOS, EOS, SPECIAL_TOKENS, render_chat
from tools.demo_model.export import export_model
from tools.demo_model.training import checkpoint
from tools.demo_model.training.llama import LlamaForTraining, LlamaShape

TEXTS = ["def f(x):\n    return x + 1\n", "class A:\n    pass\n", "héllo wörld ☃\n"] * 3
SHAPE = {
    "hidden": 32,
    "intermediate": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "context": 64,
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo-model")
    trained = tokenizer.train_tokenizer(TEXTS, 300)
    trained.save(str(root / tokenizer.TOKENIZER_FILE))
    torch.manual_seed(0)
    model = LlamaForTraining(LlamaShape(trained.get_vocab_size(), **SHAPE))
    for (
        parameter
    ) in model.parameters():  # wide enough to tell a wrong rotation, and not exact in bfloat16
        torch.nn.init.normal_(parameter, std=0.3)
    checkpoint.save_checkpoint(root / "weights", model)
    export_model(root, root / "weights", root / "out")
    return root / "out"


def test_transformers_computes_the_same_logits(exported: Path) -> None:
    theirs = LlamaForCausalLM.from_pretrained(exported, dtype=torch.float32)
    config = theirs.config
    ours = LlamaForTraining(LlamaShape(config.vocab_size, **SHAPE))
    missing = ours.load_state_dict(
        {name: tensor.float() for name, tensor in load_file(exported / "model.safetensors").items()}
    )
    assert not missing.missing_keys
    tokens = torch.randint(
        0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_ids_of_the_ends_agree(exported: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((exported / name).read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (
            SPECIAL_TOKENS.index(BOS),
            SPECIAL_TOKENS.index(EOS),
        )


def test_text_comes_back_whole(exported: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(exported)
    for text in (*TEXTS, "\t\r\n  x  \n\n", "日本語 🙂", " a", "    indented"):
        ids = loaded.encode(text)
        assert ids[0] == loaded.bos_token_id
        assert loaded.decode(ids, skip_special_tokens=True) == text


def test_text_cut_at_a_line_is_tokenized_as_it_is_within_the_text(exported: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(exported)
    text = "def f(x):\n    return x + 1\n"
    for cut in ("def f(x):\n", "def f(x):\n    "):
        ids = loaded.encode(cut)
        assert loaded.encode(text)[: len(ids)] == ids


def test_the_template_is_the_layout_of_training(exported: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(exported)
    turns = [
        ("system", "Be brief."),
        ("user", " hello "),
        ("assistant", "Hi."),
        ("user", "What is\nf?"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    rendered = loaded.apply_chat_template(messages, tokenize=False)
    assert rendered == render_chat(turns)
    assert rendered.count(BOS) == 1
    prompt_ids = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt_ids == render_chat(turns) + "<|assistant|>"
    ids = loaded.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids == loaded.encode(render_chat(turns), add_special_tokens=False)
    assert ids.count(loaded.bos_token_id) == 1


def test_the_template_refuses_another_role(exported: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(exported)
    with pytest.raises(Exception, match="roles are system, user and assistant"):
        loaded.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
