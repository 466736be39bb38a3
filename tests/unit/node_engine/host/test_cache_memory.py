"""How much memory a node's cache gets, and what it says when that cannot be."""

from pathlib import Path

import pytest

from baton.config.memory_size import parse_memory_size
from baton.config.settings import Config
from baton.errors import ConfigError
from node_engine.core.scheduling.step_limits import DeviceType
from node_engine.core.step.device_memory import DeviceMemoryProfile
from node_engine.host.host_arena import compute_cache_blocks, require_cache_memory

FREE = 100 << 30
MIB = 1 << 20
GPU = DeviceMemoryProfile(1280 * MIB, 1280 * MIB, 0, 0, 0)  # of which 1 GiB is kept in reserve


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", 1 << 30),
        ("4GiB", 4 << 30),
        ("0.5GiB", 512 << 20),
        ("512MiB", 512 << 20),
        ("1048576", 1 << 20),
        ("0.5", 50 << 30),
    ],
)
def test_parse_memory(text: str, size: int) -> None:
    assert parse_memory_size(text, FREE) == size


def test_auto_leaves_a_small_folder_its_room() -> None:
    assert parse_memory_size("auto", 1 << 30) == (1 << 30) // 10


@pytest.mark.parametrize(
    "text", ["", "much", "4GB", "inf", "nan", "infGiB", "1e400", "0", "-1", "-0.5", "-1GiB"]
)
def test_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_memory_size(text, FREE)
    assert repr(text) in str(caught.value)


def test_too_few_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 3 blocks"):
        compute_cache_blocks(Config(kv_memory="3000", segment_dir=str(tmp_path)), 1000, 64)


def test_a_segment_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--segment-dir"):
        compute_cache_blocks(Config(segment_dir="/nowhere/at/all"), 1000, 64)


def test_auto_is_no_more_than_all_sequences_need(tmp_path: Path) -> None:
    assert compute_cache_blocks(Config(segment_dir=str(tmp_path)), 1000, 3 * 7) == 3 * 7
    given = Config(segment_dir=str(tmp_path), kv_memory="1000000")
    assert compute_cache_blocks(given, 1000, 3 * 7) == 1000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_much_memory_is_refused_before_allocation(device: DeviceType, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot hold \d+ bytes .*kept in reserve: lower --kv-memory to .* or less",
    ):
        require_cache_memory(Config(kv_memory="900TiB", segment_dir=str(tmp_path)), device)


@pytest.mark.parametrize(("kv_memory", "blocks"), [("auto", 256), ("0.1", 128), ("7MiB", 7)])
def test_cache_of_a_gpu_is_sized_by_its_memory(kv_memory: str, blocks: int, tmp_path: Path) -> None:
    config = Config(kv_memory=kv_memory, segment_dir=str(tmp_path))
    require_cache_memory(config, "cuda")
    assert compute_cache_blocks(config, MIB, 1 << 40, GPU) == blocks


def test_cache_of_a_gpu_needs_as_much_host_memory(tmp_path: Path) -> None:
    large = DeviceMemoryProfile(900 << 40, 900 << 40, 0, 0, 0)
    config = Config(kv_memory="0.9", segment_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot hold \d+ bytes .*lower --kv-memory"):
        compute_cache_blocks(config, MIB, 1 << 40, large)


def test_a_gpu_without_room_is_reported_with_figures(tmp_path: Path) -> None:
    full = DeviceMemoryProfile(4 << 30, 1 << 30, 3 << 30, 0, 0)
    with pytest.raises(
        ConfigError, match=r"holds 0 blocks .*1\.0GiB of 4\.0GiB are free .*the host has"
    ):
        compute_cache_blocks(Config(segment_dir=str(tmp_path)), MIB, 1 << 40, full)
