"""Which weights a node begins to read before it imports torch."""

import asyncio
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.types import Role
from kv_kernels.native.native_library import NativeLibrary, load_library
from node_engine.core.scheduling.step_limits import StepLimits
from node_engine.host import assemble
from node_engine.host.assemble import run_node
from node_engine.host.cpu_kernels import begin_opening_weights
from node_engine.host.engine_factory import build_engine
from node_engine.model.cpu import native_loader
from node_engine.model.loading.packed_weights.cache_folder import WeightCacheFolder
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


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that read cache files of weights."""
    names: list[str] = []
    load_image = WeightCacheFolder.load_image

    def note_thread(self: WeightCacheFolder, *given: Any) -> dict[str, str] | None:
        names.append(threading.current_thread().name)
        return load_image(self, *given)

    monkeypatch.setattr(WeightCacheFolder, "load_image", note_thread)
    return names


def start_and_stop(config: NodeConfig) -> tuple[bool, str | None]:
    """Returns whether weights were begun to read early, and where the engine found its own."""
    with ExitStack() as opened:
        weights = begin_opening_weights(config, opened)
        engine = build_engine(config, "cpu", LIMITS, weights)
    return weights is not None, engine.compute_device.packed_weight_source


def test_the_weights_of_the_last_start_are_read_early(settings: dict[str, Any]) -> None:
    config = NodeConfig(**settings)
    assert start_and_stop(config) == (False, "checkpoint")
    assert start_and_stop(config) == (True, "cache file")
    int8 = NodeConfig(**settings, quantize="int8")
    assert start_and_stop(int8) == (False, "checkpoint")
    assert start_and_stop(int8) == (True, "cache file")


def test_a_node_uses_what_was_read_while_torch_was_imported(
    settings: dict[str, Any], readers: list[str]
) -> None:
    config = NodeConfig(**settings, coordinator="127.0.0.1:1", kv_memory="4MiB")
    start_and_stop(config)
    readers.clear()
    stop = asyncio.Event()
    stop.set()
    asyncio.run(run_node(config, Role.DECODE, stop))
    assert readers == ["packed-weights"], "once, on the thread that begins before the import"


def test_weights_that_take_the_memory_of_the_cache_are_given_up(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be of another model than the one in the folder now."""
    config = NodeConfig(**settings)
    start_and_stop(config)
    folder = Path(settings["segment_dir"])

    def require_room(*_: object) -> None:
        if list(folder.iterdir()):
            raise ConfigError("kv_memory is more than there is")

    monkeypatch.setattr(assemble, "require_cache_memory", require_room)
    with ExitStack() as opened:
        weights = begin_opening_weights(config, opened)
        assert weights is not None
        assemble.check_cache_memory(config, "cpu", weights)
        (folder / "other").touch()
        with pytest.raises(ConfigError, match="more than there is"):
            assemble.check_cache_memory(config, "cpu", weights)


def test_a_start_that_fails_leaves_nothing(settings: dict[str, Any]) -> None:
    config = NodeConfig(**settings, coordinator="127.0.0.1:1", kv_memory="999TiB")
    start_and_stop(config)
    with pytest.raises(ConfigError, match="lower --kv-memory"):
        asyncio.run(run_node(config, Role.DECODE, asyncio.Event()))
    assert "packed-weights" not in [thread.name for thread in threading.enumerate()]
    assert list(Path(settings["segment_dir"]).iterdir()) == []


@pytest.mark.parametrize("min_shared_bytes", [0, 1 << 30])
def test_weights_of_another_model_are_released(
    settings: dict[str, Any],
    min_shared_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = NodeConfig(**settings)
    start_and_stop(config)
    other = build_model("llama", tmp_path, seed=5)
    shutil.copy(other / "model.safetensors", settings["model"])
    monkeypatch.setattr(native_loader, "MIN_SHARED_BYTES", min_shared_bytes)
    folder = Path(settings["segment_dir"])
    before = set(folder.glob("baton-weights-*"))
    with ExitStack() as opened:
        engine = build_engine(config, "cpu", LIMITS, begin_opening_weights(config, opened))
        segments = set(folder.glob("baton-weights-*")) - before
        assert len(segments) == (0 if min_shared_bytes else 1)
        assert engine.compute_device.packed_weight_source != "cache file"


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
    with ExitStack() as opened:
        assert begin_opening_weights(NodeConfig(**settings | other), opened) is None
