"""A tokenizer read from its files is what transformers makes of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from coordinator.text import tokenizer_loader
from coordinator.text.chat_template import ChatPrompt
from tests.small_tokenizers import CORPUS, EOS_TOKEN, byte_level_tokenizer

BOS = "<|begin|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)
TALK = [{"role": "user", "content": "hello wörld 😀"}]


def write_tokenizer_files(where: Path, *, begins: bool = False, **settings: Any) -> Path:
    """A model folder; with `begins`, tokenizer.json itself puts BOS before a text."""
    backend = tokenizers.Tokenizer.from_str(byte_level_tokenizer().to_str())
    backend.add_special_tokens([BOS])
    if begins:
        bos = backend.token_to_id(BOS)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, bos)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS_TOKEN
    ).save_pretrained(where)
    file = where / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return where


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"begins": True},
        {"begins": True, "add_bos_token": True},
        {"begins": False, "add_bos_token": True},
        {"begins": True, "add_bos_token": False},
        {"add_eos_token": True},
        {"bos_token": {"__type": "AddedToken", "content": BOS, "special": True}},
    ],
    ids=str,
)
async def test_encoding_equals_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    where = write_tokenizer_files(tmp_path, **settings)
    ours, theirs = (
        await tokenizer_loader.load_tokenizer(str(where), "model"),
        AutoTokenizer.from_pretrained(where),
    )
    for text in [*CORPUS[:5], f"a{EOS_TOKEN}b", ""]:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert await ours.encode(text, add_special_tokens=special) == tuple(expected)


@pytest.mark.parametrize("place", ["settings", "file", "names"])
async def test_the_chat_template_is_found(tmp_path: Path, place: str) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    settings: dict[str, dict[str, Any]] = {
        "settings": {"chat_template": TEMPLATE},
        "names": {"chat_template": named},
    }
    where = write_tokenizer_files(tmp_path, begins=True, **settings.get(place, {}))
    if place == "file":
        (where / "chat_template.jinja").write_text(TEMPLATE)
    ours, theirs = (
        await tokenizer_loader.load_tokenizer(str(where), "model"),
        AutoTokenizer.from_pretrained(where),
    )
    prompt = await ours.encode_chat(ChatPrompt(TALK))
    rendered = theirs.apply_chat_template(TALK, tokenize=False)
    assert await ours.decode(prompt) == rendered == f"{BOS}user: hello wörld 😀{EOS_TOKEN}"
    ids = theirs.apply_chat_template(TALK, return_dict=False)
    assert prompt == tuple(ids)
    assert ids.count(theirs.bos_token_id) == 1


@pytest.mark.parametrize("is_from_files", [True, False])
async def test_settings_have_special_tokens_as_text(tmp_path: Path, is_from_files: bool) -> None:
    """Also where transformers reads them; and no path of this machine."""
    token = {"__type": "AddedToken", "content": BOS, "special": True}
    where = write_tokenizer_files(
        tmp_path, bos_token=token, begins=True, add_bos_token=is_from_files
    )
    loaded = await tokenizer_loader.load_tokenizer(str(where), "model")
    assert loaded.settings["bos_token"] == BOS
    assert loaded.settings["eos_token"] == EOS_TOKEN
    assert str(tmp_path) not in json.dumps(dict(loaded.settings))


@pytest.mark.slow
def test_loading_does_not_import_transformers(tmp_path: Path) -> None:
    """Its import costs seconds, and brings torch."""
    where = write_tokenizer_files(tmp_path, chat_template=TEMPLATE)
    code = (
        "import asyncio, sys\n"
        "from coordinator import assemble\nfrom coordinator.text import tokenizer_loader\n"
        f"asyncio.run(tokenizer_loader.load_tokenizer({str(where)!r}, 'model'))\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip().splitlines()[-1] == "[]"


async def test_settings_name_special_tokens_by_their_text(tmp_path: Path) -> None:
    eos = {"content": EOS_TOKEN, "lstrip": False, "special": True}
    folder = write_tokenizer_files(tmp_path, eos_token=eos, model_max_length=512)
    text = await tokenizer_loader.load_tokenizer(str(folder), "model")
    assert text.settings["eos_token"] == EOS_TOKEN
    assert text.settings["model_max_length"] == 512
