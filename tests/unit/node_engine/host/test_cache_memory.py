"""How much memory a node's cache gets, and what it says when that cannot be."""

from pathlib import Path

import pytest

from baton.config.memory_size import parse_memory_size
from baton.config.settings import Config
from baton.errors import ConfigError
from node_engine.host.host_arena import compute_cache_blocks, compute_cache_bytes

FREE = 100 << 30


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
    config = Config(max_num_seqs=3, block_size=16, segment_dir=str(tmp_path))
    assert compute_cache_blocks(config, 1000, 100) == 3 * 7
    given = Config(max_num_seqs=3, block_size=16, segment_dir=str(tmp_path), kv_memory="1000000")
    assert compute_cache_blocks(given, 1000, 100) == 1000


def test_too_much_memory_is_refused_before_allocation(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot hold \d+ bytes .*kept in reserve: lower --kv-memory to .* or less",
    ):
        compute_cache_bytes(Config(kv_memory="900TiB", segment_dir=str(tmp_path)))
