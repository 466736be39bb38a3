"""Which weights a node begins to read before it imports torch."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.config.node_config import NodeConfig
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.host.cpu_kernels import begin_opening_weights
from node_engine.host.engine_factory import build_engine
from node_engine.model.cpu import native_loader
from tests.models import build_model

LIMITS = StepLimits(max_num_seqs=4, max_batched_tokens=64)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a node whose small model is packed for the host, as larger ones are."""
    if not isinstance(load_library(), NativeLibrary):
        pytest.skip("there are no native kernels here")
    monkeypatch.setattr(native_loader, "MIN_SHARED_BYTES", 0)
    segments = tmp_path / "segments"
    segments.mkdir()
    return {
        "model": str(build_model("llama", tmp_path)),
        "device": "cpu",
        "segment_dir": str(segments),
        "weight_cache_dir": str(tmp_path / "cache"),
    }


def start_and_stop(config: NodeConfig) -> tuple[bool, str | None]:
    """Returns whether weights were begun to read early, and where the engine found its own."""
    weights = begin_opening_weights(config)
    engine = build_engine(config, "cpu", LIMITS, weights)
    return weights is not None, engine.compute_device.packed_weight_source


def test_the_weights_of_the_last_start_are_read_early(settings: dict[str, Any]) -> None:
    config = NodeConfig(**settings)
    assert start_and_stop(config) == (False, "checkpoint")
    assert start_and_stop(config) == (True, "cache file")
    int8 = NodeConfig(**settings, quantize="int8")
    assert start_and_stop(int8) == (False, "checkpoint")
    assert start_and_stop(int8) == (True, "cache file")


def test_a_model_that_was_changed_is_packed_again(settings: dict[str, Any], tmp_path: Path) -> None:
    config = NodeConfig(**settings)
    start_and_stop(config)
    other = build_model("llama", tmp_path, seed=5)
    shutil.copy(other / "model.safetensors", settings["model"])
    assert start_and_stop(config) == (True, "checkpoint")
    assert start_and_stop(config) == (True, "cache file")


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda"},
        {"cpu_kernels": "torch"},
        {"engine": "paced"},
        {"weight_cache_dir": "off"},
    ],
)
def test_nothing_is_read_for_engines_without_packed_weights(
    settings: dict[str, Any], other: dict[str, Any]
) -> None:
    start_and_stop(NodeConfig(**settings))
    assert begin_opening_weights(NodeConfig(**settings | other)) is None
