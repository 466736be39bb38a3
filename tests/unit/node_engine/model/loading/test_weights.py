"""Reading checkpoints: what is refused, and what the model's digest depends on."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model, load_reference_model

ROOT = Path(__file__).parents[5]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("qwen2", tmp_path_factory.mktemp("models"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def digest(folder: Path, **options: object) -> bytes:
    return load_model_engine(folder, **options).model_digest  # type: ignore[arg-type]


def test_shards_and_dtype_of_computation_do_not_change_the_digest(
    original: Path, tmp_path: Path
) -> None:
    load_reference_model(original).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert len(digest(original)) == 32
    assert digest(original) == digest(tmp_path) == digest(original, dtype="bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: rewrite(folder, lambda t: t["model.norm.weight"][:1].add_(1e-3)),
        lambda folder: edit_config(folder, rms_norm_eps=1e-5),
        lambda folder: edit_config(
            folder,
            use_sliding_window=True,
            sliding_window=64,
            layer_types=["full_attention", "sliding_attention"],
        ),
        lambda folder: edit_config(
            folder, rope_parameters={"rope_type": "default", "rope_theta": 9999.0}
        ),
    ],
    ids=["one weight", "epsilon", "window", "rope"],
)
def test_whatever_changes_the_answer_changes_the_digest(
    original: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    change(folder)
    assert digest(folder) != digest(original)


def test_eos_and_length_do_not_change_the_digest(original: Path, folder: Path) -> None:
    edit_config(folder, eos_token_id=3, max_position_embeddings=512)
    assert digest(folder) == digest(original)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            ["lacks", "model.layers.1.mlp.up_proj.weight"],
        ),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), ["model.extra"]),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(511, 64)}),
            ["lm_head.weight", "(511, 64)", "(512, 64)"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            ["model.norm.weight", "int8"],
        ),
    ],
    ids=["missing", "extra", "misshaped", "quantized"],
)
def test_tensors_that_do_not_fit_are_named(
    folder: Path, change: Callable[[Tensors], object], named: list[str]
) -> None:
    rewrite(folder, change)
    with pytest.raises(ConfigError) as refused:
        load_model_engine(folder)
    for word in named:
        assert word in refused.value.message


def test_unread_buffers_of_old_checkpoints_are_ignored(original: Path, folder: Path) -> None:
    rewrite(
        folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    )
    assert digest(folder) == digest(original)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*safetensors"):
        load_model_engine(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="--load-format dummy"):
        load_model_engine(folder)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100], ids=["empty", "garbage"])
def test_a_damaged_file_is_named(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_model_engine(folder)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "{}",
        '{"weight_map": {"a": "gone.safetensors"}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
    ],
)
def test_a_damaged_index_is_named(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        load_model_engine(folder)


def test_dummy_weights_need_no_checkpoint_and_are_the_same_everywhere(
    original: Path, folder: Path
) -> None:
    (folder / "model.safetensors").unlink()
    assert (
        digest(folder, load_format="dummy")
        == digest(original, load_format="dummy")
        != digest(original)
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"max_model_len": 4096}, "--max-model-len 4096"),
        ({"max_model_len": 0}, "--max-model-len 0"),
    ],
)
def test_arguments_that_cannot_be_served_are_named(
    original: Path, options: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=named):
        load_model_engine(original, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_node_starts_without_transformers() -> None:
    """It takes three seconds to import, in every process."""
    code = "import sys, node_engine.model.model_engine; sys.exit('transformers' in sys.modules)"
    path = f"{ROOT}:{ROOT / 'kernels'}"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=True, timeout=100)
