"""When a node's device takes part in KV transfer, and what is said when it does not."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from baton.config.node_config import NodeConfig
from baton.errors import ConfigError
from baton.kv.blocks import KVLayout
from baton.shared_memory.segment import Segment, create_segment, round_up_segment_bytes
from kv_transfer.device import open_device as opening
from kv_transfer.device.cuda_driver_api import CudaError
from kv_transfer.device.fence_self_test import FenceFailed
from kv_transfer.device.writer_process import ProvableWriter

pytest.importorskip("triton")

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


@dataclass
class Arena:
    segment: Segment
    num_blocks: int
    block_memory: memoryview


@dataclass
class HostEngine:
    layout: KVLayout


@dataclass
class DeviceEngine:
    layout: KVLayout
    device_arena: torch.Tensor

    def void_loads(self, blocks: Sequence[int]) -> None: ...


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(segment_dir=str(tmp_path), transport="auto", engine="model")


@pytest.fixture
def writer(tmp_path: Path) -> ProvableWriter:
    return ProvableWriter(tmp_path)


@pytest.mark.parametrize(
    ("change", "has_driver", "is_opened"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"device": "cpu"}, True, False),
        ({"engine": "paced"}, True, False),
        ({"transport": "shm"}, True, False),
        ({"transport": "cuda_ipc", "device": "cpu"}, False, True),
    ],
    ids=str,
)
def test_a_lock_is_opened_where_a_device_may_write(
    config: NodeConfig,
    change: dict[str, str],
    has_driver: bool,
    is_opened: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "UVM_FILE", "/dev/null" if has_driver else "/nowhere")
    with ExitStack() as opened:
        found = opening.open_writer(replace(config, **change), opened)  # type: ignore[arg-type]
        assert (found is not None) == is_opened
        assert len(os.listdir(config.segment_dir)) == is_opened
    assert os.listdir(config.segment_dir) == []


def test_a_cpu_node_has_a_stand_in_only_if_it_is_asked_for(
    config: NodeConfig, writer: ProvableWriter
) -> None:
    segment = create_segment(
        Path(config.segment_dir), "arena", round_up_segment_bytes(1, LAYOUT.block_bytes)
    )
    arena = Arena(segment, 4, segment.view)
    engine = HostEngine(LAYOUT)
    with ExitStack() as opened:
        assert opening.open_device(config, engine, arena, None, opened) is None
        assert opening.open_device(config, engine, arena, writer, opened) is None
        asked = replace(config, transport="cuda_ipc")
        device = opening.open_device(asked, engine, arena, writer, opened)
        assert device is not None
        assert (device.num_blocks, device.writer_name) == (4, writer.name)
    segment.close()


def test_a_gpu_that_can_do_neither_is_left_out_or_an_error(
    config: NodeConfig, writer: ProvableWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver(index: int) -> None:
        raise CudaError("libcuda.so.1: not found")

    def no_fence(index: int, folder: Path) -> None:
        raise FenceFailed("a killed writer wrote on")

    monkeypatch.setattr(opening, "CudaDriver", no_driver)
    monkeypatch.setattr(opening, "check_fence", no_fence)
    engine = DeviceEngine(LAYOUT, torch.zeros(1))
    segment = create_segment(
        Path(config.segment_dir), "arena", round_up_segment_bytes(1, LAYOUT.block_bytes)
    )
    arena = Arena(segment, 4, segment.view)
    with ExitStack() as opened:
        assert opening.open_device(config, engine, arena, writer, opened) is None
        with pytest.raises(ConfigError, match=r"not found.*a killed writer wrote on"):
            opening.open_device(
                replace(config, transport="cuda_ipc"), engine, arena, writer, opened
            )
    segment.close()


def test_mps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(opening, "check_fence", lambda index, folder: 1 / 0)
    os.mkfifo(tmp_path / "control")
    assert "MPS server" in opening.find_fence_refusal(0, tmp_path)
