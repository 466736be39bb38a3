"""What the probe of `baton doctor` finds of a driver and of GPUs, which are faked."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from node_engine import probe

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\nGCC version: 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)


class FakeLibcuda:
    """The driver's library, of CUDA 12.8."""

    def __init__(self, name: str) -> None:
        assert name == "libcuda.so.1"

    def cuDriverGetVersion(self, number: Any) -> int:
        number._obj.value = 12080
        return 0


@pytest.mark.usefixtures("without_library")
def test_machine_without_driver(tmp_path: Path) -> None:
    assert probe.probe_driver(tmp_path) is None


@pytest.mark.usefixtures("without_library")
@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "570.86.15"), (OPEN, "580.95.05")])
def test_container_without_gpus(tmp_path: Path, text: str, version: str) -> None:
    folder = tmp_path / "proc" / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(text)
    found = probe.probe_driver(tmp_path)
    assert found is not None
    assert (found["version"], found["has_device_files"], found["cuda_version"]) == (
        version,
        False,
        None,
    )


def test_machine_with_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeLibcuda)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert probe.probe_driver(tmp_path) == {
        "version": None,
        "has_device_files": True,
        "cuda_version": "12.8",
        "visible_devices": "-1",
    }


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def mem_get_info(index: int) -> tuple[int, int]:
        if index == 1:
            raise torch.AcceleratorError("CUDA error: unknown error\nCUDA kernel errors might be")
        return 3, 4

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    found = probe.probe_libraries()
    assert found["gpus"] == [
        {"name": "NVIDIA H200", "capability": [9, 0], "free_bytes": 3, "total_bytes": 4},
        {"name": "NVIDIA H200", "capability": [9, 0], "error": "CUDA error: unknown error"},
    ]
    assert found["torch"]["cuda"] == torch.version.cuda
