"""The folder that is bundled: whole, small, readable, and silent about the machine it was made
on."""

import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from tools.demo_model.export import MAX_FOLDER_BYTES

FOLDER = Path(__file__).resolve().parents[4] / "models" / "demo"
FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_model_folder_is_complete_and_small() -> None:
    files = {file.name: file.stat().st_size for file in FOLDER.iterdir()}
    assert set(files) == FILES
    assert sum(files.values()) <= MAX_FOLDER_BYTES


def test_weights_are_those_of_the_config() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        embeddings = weights.get_slice("model.embed_tokens.weight")
        assert embeddings.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embeddings.get_dtype() == "BF16"
        layers = {name.split(".")[2] for name in weights.keys() if ".layers." in name}
    assert len(layers) == config["num_hidden_layers"]


def test_tokenizer_and_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = 'def f(x):\n    """Return x."""\n    return x\n'
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|bos|><|user|>Hello!<|assistant|>"


@pytest.mark.parametrize("name", sorted(FILES - {"model.safetensors", "tokenizer.json"}))
def test_model_files_hold_no_local_path(name: str) -> None:
    assert not re.search(
        r"(?<![\w.:/])/(home|root|work|tmp|usr|mnt|Users)/", (FOLDER / name).read_text()
    )


def test_the_card_has_what_a_reader_asks_for() -> None:
    card = (FOLDER / "README.md").read_text()
    for word in (
        "PSF License",
        "train_demo_model prepare",
        "train_demo_model train --",
        "bits per byte",
        "ast.parse",
    ):
        assert word in card
