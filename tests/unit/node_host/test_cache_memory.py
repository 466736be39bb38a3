"""How much memory a node's cache gets, and what it says when that cannot be."""

from pathlib import Path

import pytest

from baton.config import Config
from baton.errors import ConfigError
from baton.memory_size import parse_memory
from node_engine.host.engines import cache_blocks, cache_memory

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
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text, FREE) == size


def test_auto_leaves_a_small_folder_its_room() -> None:
    assert parse_memory("auto", 1 << 30) == (1 << 30) // 10


@pytest.mark.parametrize("text", ["", "much", "4GB", "inf", "nan", "infGiB", "1e400", "0", "-1", "-0.5", "-1GiB"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_memory(text, FREE)
    assert repr(text) in str(caught.value)


def test_too_little_for_a_few_blocks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds 3 blocks"):
        cache_blocks(Config(kv_memory="3000", segment_dir=str(tmp_path)), 1000, 64)


def test_a_segment_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--segment-dir"):
        cache_blocks(Config(segment_dir="/nowhere/at/all"), 1000, 64)


def test_auto_is_no_more_than_all_sequences_need(tmp_path: Path) -> None:
    config = Config(max_num_seqs=3, block_size=16, segment_dir=str(tmp_path))
    assert cache_blocks(config, 1000, 100) == 3 * 7
    given = Config(max_num_seqs=3, block_size=16, segment_dir=str(tmp_path), kv_memory="1000000")
    assert cache_blocks(given, 1000, 100) == 1000


def test_more_than_there_is_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot hold \d+ bytes .*kept in reserve: lower --kv-memory to .* or less"):
        cache_memory(Config(kv_memory="900TiB", segment_dir=str(tmp_path)))
