"""Which kernels a node on CPUs takes, what it logs, and when it refuses to start."""

import ctypes
from typing import Any

import pytest
from structlog.testing import capture_logs

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from kv_kernels.native.native_library import CpuFeature, NativeLibrary, NoNativeLibrary
from node_engine.host import cpu_kernels

LIBRARY = NativeLibrary(ctypes.CDLL(None), CpuFeature.AVX2, "of a test")
NOT_BUILT = NoNativeLibrary("it is not built", "build it")


def load(
    monkeypatch: pytest.MonkeyPatch, there: NativeLibrary | NoNativeLibrary, **settings: Any
) -> tuple[NativeLibrary | None, list[Any]]:
    monkeypatch.setattr(cpu_kernels, "load_library", lambda mode: there)
    with capture_logs() as lines:
        return cpu_kernels.load_cpu_kernels(NodeConfig(**settings)), lines


def test_native_kernels_are_taken_if_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found, [line] = load(monkeypatch, LIBRARY)
    assert found is LIBRARY
    assert line["kernels"] == "native (AVX2)"


def test_node_without_them_says_why_once_and_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found, [line] = load(monkeypatch, NOT_BUILT)
    assert found is None
    assert (line["event"], line["kernels"], line["fix"]) == (
        "cpu kernels chosen",
        "torch (it is not built)",
        "build it",
    )


def test_node_that_must_have_them_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--cpu-kernels native, and it is not built: build it"):
        load(monkeypatch, NOT_BUILT, cpu_kernels="native")
    with pytest.raises(ConfigError, match="no AVX2: set --cpu-kernels auto"):
        load(monkeypatch, NoNativeLibrary("no AVX2"), cpu_kernels="native")
    assert load(monkeypatch, LIBRARY, cpu_kernels="native")[0] is LIBRARY


def test_setting_is_passed_on() -> None:
    with capture_logs() as lines:
        assert cpu_kernels.load_cpu_kernels(NodeConfig(cpu_kernels="torch")) is None
    assert "--cpu-kernels torch" in lines[0]["kernels"]
