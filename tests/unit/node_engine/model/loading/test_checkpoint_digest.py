import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from node_engine.model.config.model_config import load_model_config
from node_engine.model.loading.checkpoint import Checkpoint
from node_engine.model.loading.checkpoint_digest import find_model_digest
from node_engine.model.loading.model_tensors import CheckpointTensors
from node_engine.model.loading.packed_weights import checkpoint_fingerprint
from node_engine.model.loading.packed_weights.digest_cache import ModelDigestCache
from node_engine.model.model_loader import load_model_engine
from tests.models import build_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose files changed long ago: the clock of fingerprints is an hour ahead."""
    later = time.time_ns() + 3_600_000_000_000
    monkeypatch.setattr(checkpoint_fingerprint, "read_wall_clock_ns", lambda: later)
    return build_model("qwen2", tmp_path)


def find(folder: Path, cache: ModelDigestCache | None) -> bytes:
    config = load_model_config(folder)
    with closing(CheckpointTensors(folder, config, torch.float32, torch.device("cpu"))) as tensors:
        return find_model_digest(folder, tensors, cache)


def test_an_unchanged_checkpoint_is_not_read_and_a_changed_one_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    cache = ModelDigestCache(tmp_path / "cache")
    loaded = load_model_engine(folder).model_digest
    assert find(folder, cache) == find(folder, None) == loaded

    def refuse(_: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} is read")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "load_tensor", refuse)
        assert find(folder, cache) == loaded
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][:1].add_(1e-3)
    save_file(tensors, folder / "model.safetensors")
    assert find(folder, cache) == load_model_engine(folder).model_digest != loaded


def test_a_checkpoint_that_does_not_match_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"lacks tensors: model\.norm\.weight"):
            find(folder, ModelDigestCache(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []
