"""Which differences between two model folders their digests show."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.models.file_digests import ModelFileDigests, compute_file_digests
from tests.models import build_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "elsewhere"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=7))


def nudge(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor + 0.01 for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def halve(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def into_shards(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    homes = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(homes.values()):
        save_file({name: tensors[name] for name in names if homes[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def test_digests_do_not_depend_on_the_path(original: Path, folder: Path) -> None:
    found = compute_file_digests(folder)
    assert found == compute_file_digests(original)
    assert "" not in (found.config_digest, found.tokenizer_digest, found.weights_digest)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda folder: edit(folder / "config.json", rope_theta=7.0), "config_digest"),
        (
            lambda folder: edit(folder / "tokenizer.json", truncation={"max_length": 5}),
            "tokenizer_digest",
        ),
        (
            lambda folder: edit(folder / "tokenizer_config.json", add_bos_token=True),
            "tokenizer_digest",
        ),
        (nudge, "weights_digest"),
        (halve, "weights_digest"),
        (lambda folder: edit(folder / "config.json", transformers_version="0"), ""),
        (lambda folder: edit(folder / "tokenizer_config.json", chat_template="{{ x }}"), ""),
        (lambda folder: (folder / "chat_template.jinja").write_text("{{ x }}"), ""),
        (
            lambda folder: (folder / "vocab.json").write_text("{}"),
            "",
        ),  # tokenizer.json is loaded alone
        (lambda folder: (folder / "merges.txt").write_text("a b"), ""),
        (into_shards, ""),
    ],
)
def test_digests_change_only_with_what_affects_tokens(
    original: Path, folder: Path, change: Callable[[Path], object], seen: str
) -> None:
    before = compute_file_digests(original)
    change(folder)
    after = compute_file_digests(folder)
    differing = [
        name
        for name in ModelFileDigests.__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    ]
    assert differing == ([seen] if seen else [])


def test_slow_tokenizer_files_count_without_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert compute_file_digests(folder).tokenizer_digest == ""
    (folder / "vocab.json").write_text("{}")
    before = compute_file_digests(folder).tokenizer_digest
    assert before
    (folder / "merges.txt").write_text("a b")
    assert compute_file_digests(folder).tokenizer_digest not in ("", before)


def test_missing_or_truncated_files_have_no_digest(folder: Path, tmp_path: Path) -> None:
    assert compute_file_digests(tmp_path / "nowhere") == ModelFileDigests()
    assert compute_file_digests(folder, dummy=True).weights_digest == "dummy"
    weights = folder / "model.safetensors"
    for content in (b"", b"\xff" * 64, weights.read_bytes()[:-8]):
        weights.write_bytes(content)
        assert compute_file_digests(folder).weights_digest == ""
    into = folder / "model.safetensors.index.json"
    into.write_text(json.dumps({"weight_map": {"x": "../elsewhere/model.safetensors"}}))
    assert compute_file_digests(folder).weights_digest == ""
